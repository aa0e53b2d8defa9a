"""hfpatch in Axolotl: three lines of its YAML.

    plugins:
      - hfpatch.trainer.plugins.axolotl.HFPatchPlugin
    hfpatch: {checkpointing: least}

The block takes the options of `hfpatch.apply`; leave it out for the defaults.
"""

from typing import Literal

from axolotl.integrations.base import BasePlugin
from pydantic import BaseModel, ConfigDict

from hfpatch.trainer.callback import Callback
from hfpatch.trainer.plugins import apply_tiled

# Axolotl's own ways to do what hfpatch does: two of them on one module would be one too many.
RIVALS = (
    "liger_rope", "liger_rms_norm", "liger_layer_norm", "liger_swiglu", "liger_glu_activation",
    "liger_cross_entropy", "liger_fused_linear_cross_entropy", "cut_cross_entropy",
    "chunked_cross_entropy", "tiled_mlp", "lora_mlp_kernel", "lora_qkv_kernel", "lora_o_kernel",
    "activation_offloading",
)  # fmt: skip


class Options(BaseModel):
    """The `hfpatch:` block: the options of `hfpatch.apply` that YAML can write."""

    model_config = ConfigDict(extra="forbid")

    rope: bool = True
    rope_float64: bool = False
    rms_norm: bool = True
    mlp: bool = True
    loss: bool = True
    checkpointing: Literal["auto", "least", "off"] = "auto"
    logits: bool | Literal["auto"] = "auto"


class Arguments(BaseModel):
    """What the plugin adds to Axolotl's config."""

    hfpatch: Options | None = None


class HFPatchPlugin(BasePlugin):
    """Patches the model once it has its adapters, before a Trainer is made with it."""

    def get_input_args(self) -> str:
        """The dotted name of `Arguments`, which Axolotl merges into its config."""
        return f"{__name__}.Arguments"

    def pre_model_load(self, cfg) -> None:
        """Refuses Axolotl's own kernels: a ValueError that names the first of them."""
        came = next((name for name in RIVALS if cfg.get(name)), None)
        if came is not None:
            raise ValueError(f"hfpatch: expected one implementation, {came} came too; drop it.")

    def post_model_load(self, cfg, model) -> None:
        """Patches the model. Raises ValueError where that changes no layer."""
        given = cfg.get("hfpatch") or {}
        # Axolotl's config after its check holds plain dicts, with None for what was left out.
        options = {name: value for name, value in dict(given).items() if value is not None}
        apply_tiled(model, Options(**options).model_dump())

    def add_callbacks_post_trainer(self, cfg, trainer) -> list:
        """The columns of `hfpatch.Callback` in each log line."""
        return [Callback()]
