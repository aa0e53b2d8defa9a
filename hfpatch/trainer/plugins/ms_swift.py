"""hfpatch in ms-swift: `swift sft --external_plugins <this file> --callbacks hfpatch`.

`python -c "import hfpatch.trainer.plugins as p; print(p.__path__[0])"` prints the folder of this
file. Options of `hfpatch.apply` come by `hfpatch run`, which needs no plugin.
"""

from swift.callbacks import callbacks_map

from hfpatch.trainer.callback import Callback
from hfpatch.trainer.plugins import expect_tiles


class SwiftCallback(Callback):
    """hfpatch.Callback(apply=True). ms-swift makes callbacks before its Trainer has a model, which
    `on_init_end` then patches.
    """

    def __init__(self, args, trainer):
        super().__init__(apply=True)

    def on_init_end(self, args, state, control, model=None, **kwargs):
        """Patches the model. Raises ValueError if that changes no layer."""
        super().on_init_end(args, state, control, model=model, **kwargs)
        expect_tiles(model, self.report)


callbacks_map["hfpatch"] = SwiftCallback
