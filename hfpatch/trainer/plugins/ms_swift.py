"""hfpatch in ms-swift: `swift sft --external_plugins <this file> --callbacks hfpatch`.

`python -c "import hfpatch.trainer.plugins as p; print(p.__path__[0])"` prints the folder of this
file. Options of `hfpatch.apply` come by `hfpatch run`, which needs no plugin.
"""

from swift.callbacks import callbacks_map

from hfpatch.trainer.callback import Callback
from hfpatch.trainer.plugins import apply_tiled


class SwiftCallback(Callback):
    """hfpatch.Callback as ms-swift makes its callbacks, with its arguments and its trainer.

    ms-swift adds it after the Trainer was made, when no callback is told of that any more: so the
    model is patched here.
    """

    def __init__(self, args, trainer):
        super().__init__()
        self.report = apply_tiled(trainer.model, {})


callbacks_map["hfpatch"] = SwiftCallback
