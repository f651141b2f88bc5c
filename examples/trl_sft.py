"""TRL's SFTTrainer with weights, gradients and optimizer states in 8 bits. Needs `pip install narrowgauge[hf]`.

    python examples/trl_sft.py [--recipe narrow8] [--steps 30] [--output runs/sft]

Two things differ from a script for TRL alone: the import of `SFTTrainer`, and `recipe=`. The model is made small and
random and the tokenizer knows single characters, so that nothing is downloaded; `from_pretrained` works the same.
"""

from __future__ import annotations

import argparse
import string

import torch
from datasets import Dataset
from tokenizers import Tokenizer, decoders, models
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, set_seed
from trl import SFTConfig

import narrowgauge as ng
from narrowgauge.integrations.trl import SFTTrainer

CHAT_TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def make_tokenizer() -> PreTrainedTokenizerFast:
    """A token for each printable character, and those of the chat template."""
    special = ["<|pad|>", "<|end|>", "<|user|>", "<|assistant|>"]
    inner = Tokenizer(models.BPE({token: at for at, token in enumerate((*special, *string.printable[:-5]))}, []))
    inner.decoder = decoders.Fuse()
    made = PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="<|pad|>", eos_token="<|end|>")
    made.add_special_tokens({"additional_special_tokens": special[2:]})
    made.chat_template = CHAT_TEMPLATE
    return made


def make_model(tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    """A Llama of two blocks over the tokenizer's vocabulary."""
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=64, intermediate_size=160, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=128, bos_token_id=None, eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def make_dataset() -> Dataset:
    """Questions and answers, as messages."""
    pairs = [(f"What is {a} + {b}?", str(a + b)) for a in range(8) for b in range(8)]
    return Dataset.from_list(
        [
            {"prompt": [{"role": "user", "content": ask}], "completion": [{"role": "assistant", "content": answer}]}
            for ask, answer in pairs
        ]
    )


def train(recipe: str, steps: int, output: str, resume: bool = False) -> SFTTrainer:
    """Train on the answers alone, with a checkpoint half-way; resume: from the last checkpoint in `output`."""
    set_seed(0)
    tokenizer = make_tokenizer()
    config = SFTConfig(
        output, max_steps=steps, per_device_train_batch_size=8, learning_rate=3e-3, logging_steps=10,
        save_steps=max(1, steps // 2), report_to=[], use_cpu=not torch.cuda.is_available(),
    )  # fmt: skip
    trainer = SFTTrainer(
        make_model(tokenizer), config, train_dataset=make_dataset(), processing_class=tokenizer, recipe=recipe
    )
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", default="narrow8", help=f"one of {', '.join(ng.recipe_names())}")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--output", default="runs/sft", help="a directory for checkpoints")
    parser.add_argument("--resume", action="store_true", help="go on from the last checkpoint there")
    arguments = parser.parse_args()
    trainer = train(arguments.recipe, arguments.steps, arguments.output, arguments.resume)
    print(trainer.conversion_report)
    print(trainer.ledger)


if __name__ == "__main__":
    main()
