"""hfpatch.verify of a model whose frozen weights wait on the host, which trains before and after."""

import peft
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import hfpatch


def main():
    config = LlamaConfig(
        vocab_size=1000, hidden_size=256, intermediate_size=512, num_hidden_layers=3,
        num_attention_heads=4, num_key_value_heads=2,
    )  # fmt: skip
    settings = peft.LoraConfig(r=4, target_modules=["q_proj", "down_proj"], task_type="CAUSAL_LM")
    model = peft.get_peft_model(LlamaForCausalLM(config).bfloat16(), settings)
    hfpatch.apply(model, checkpointing=hfpatch.Checkpointing(frozen_weights="host"))
    model.cuda().train()
    frozen = model.get_submodule("base_model.model.model.layers.0.self_attn.q_proj").base_layer
    ids = torch.randint(1000, (1, 512), device="cuda")
    model(input_ids=ids, labels=ids).loss.backward()
    assert hfpatch.verify(model, {"input_ids": ids}).gradients == 12
    model(input_ids=ids, labels=ids).loss.backward()
    assert frozen.weight.device.type == "cpu"


main()
