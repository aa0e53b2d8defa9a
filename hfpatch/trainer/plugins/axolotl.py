"""hfpatch in Axolotl: three lines of its YAML.

    plugins:
      - hfpatch.trainer.plugins.axolotl.HFPatchPlugin
    hfpatch: {checkpointing: least}

The block takes the options of `hfpatch.apply`, and for `checkpointing` also a block of its own with
the fields of `hfpatch.Checkpointing`; leave it out for the defaults.
"""

from typing import Literal

from axolotl.integrations.base import BasePlugin
from pydantic import BaseModel, ConfigDict, field_validator

from hfpatch.budget.policy import parse_checkpointing
from hfpatch.trainer.callback import Callback
from hfpatch.trainer.plugins import apply_tiled

# Settings by which Axolotl replaces what hfpatch replaces. Axolotl turns LORA_KERNELS on for LoRA
# if the YAML names none of them.
LORA_KERNELS = "lora_mlp_kernel", "lora_qkv_kernel", "lora_o_kernel", "lora_embedding_kernel"
RIVALS = (
    "liger_rope", "liger_rms_norm", "liger_layer_norm", "liger_swiglu", "liger_glu_activation",
    "liger_cross_entropy", "liger_fused_linear_cross_entropy", "cut_cross_entropy",
    "chunked_cross_entropy", "tiled_mlp", *LORA_KERNELS, "activation_offloading",
)  # fmt: skip


class Options(BaseModel):
    """The `hfpatch:` block: the options of `hfpatch.apply`."""

    model_config = ConfigDict(extra="forbid")

    rope: bool = True
    rms_norm: bool = True
    mlp: bool = True
    loss: bool = True
    checkpointing: str | dict = "auto"
    logits: bool | Literal["auto"] = "auto"

    @field_validator("checkpointing", mode="before")
    @classmethod
    def _off(cls, value):
        return "off" if value is False else value  # YAML reads a bare off as false

    @field_validator("checkpointing")
    @classmethod
    def _checked(cls, value):
        parse_checkpointing(value)
        return value

    def for_apply(self) -> dict:
        """Keyword arguments of `hfpatch.apply`."""
        return self.model_dump() | {"checkpointing": parse_checkpointing(self.checkpointing)}


class Arguments(BaseModel):
    """The plugin's part of Axolotl's config."""

    hfpatch: Options | None = None


class HFPatchPlugin(BasePlugin):
    """Patches the model once it has its adapters, before a Trainer is made with it."""

    def get_input_args(self) -> str:
        """The dotted name of `Arguments`, which Axolotl merges into its config."""
        return f"{__name__}.Arguments"

    def register(self, cfg) -> None:
        """Turns Axolotl's LoRA kernels off, before it checks the YAML, if the YAML names none."""
        if all(cfg.get(name) is None for name in LORA_KERNELS):
            cfg[LORA_KERNELS[0]] = False

    def pre_model_load(self, cfg) -> None:
        """Refuses Axolotl's own kernels: a ValueError that names the first of them."""
        for rival in RIVALS:
            if cfg.get(rival):
                raise ValueError(f"hfpatch: {rival} and hfpatch cannot be combined. Leave one out.")

    def post_model_load(self, cfg, model) -> None:
        """Patches the model. Raises ValueError where that changes no layer."""
        given = cfg.get("hfpatch") or {}
        # Axolotl's checked config holds plain dicts, with None for missing options.
        options = {name: value for name, value in dict(given).items() if value is not None}
        apply_tiled(model, Options(**options).for_apply())

    def add_callbacks_post_trainer(self, cfg, trainer) -> list:
        """The columns of `hfpatch.Callback` in each log line."""
        callback = Callback()
        callback.attach(trainer)
        return [callback]
