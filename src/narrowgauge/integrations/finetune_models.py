"""A Hugging Face model and its tokenizer, as fine-tuning needs them; each change to them is said."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch

from narrowgauge.errors import ConfigError
from narrowgauge.preparation import prepare
from narrowgauge.recipes.spec import Recipe

try:
    import transformers
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer
except ImportError as error:
    raise ConfigError("transformers is not installed: pip install 'narrowgauge[hf]'") from error

Say = Callable[[str], None]
PAD = "<|pad|>"  # the token that is added where a tokenizer has neither a padding token nor an end
_DEFAULT_LENGTH = 1024  # of TRL, too
_REMEDY = "expected a directory with a config.json and weights, or the name of a model on the Hugging Face hub"


class Loaded(NamedTuple):
    """A model in float32 on the CPU, and its tokenizer."""

    model: Any
    tokenizer: Any


def load(
    model: str,
    *,
    gguf_file: str | None = None,
    chat_template: str | None = None,
    is_reward: bool = False,
    say: Say = lambda message: None,
) -> Loaded:
    """Load a model to train: `model` is a directory or a name on the hub.

    gguf_file: a file in it whose weights are taken in full. chat_template: a Jinja file to use in place of the
    tokenizer's. is_reward: a model with one output a sequence; its head is new where `model` has none.

    Raises ConfigError where there is no such model, where its weights are quantized already, and for a tokenizer with
    more tokens than the model has embeddings.
    """
    where: dict[str, Any] = {"gguf_file": gguf_file} if gguf_file else {}
    if not Path(model).is_dir() and (model.startswith((".", "/", "~")) or model.count("/") > 1):
        raise ConfigError(f"model={model!r}: expected a directory, found none: look at the path")
    config = _found(model, lambda: AutoConfig.from_pretrained(model, **where))
    check_plain(model, config)
    tokenizer = load_tokenizer(model, gguf_file, chat_template)
    kind = AutoModelForSequenceClassification if is_reward else AutoModelForCausalLM
    labels = {"num_labels": 1} if is_reward else {}
    found, info = _found(
        model,
        lambda: kind.from_pretrained(
            model, dtype=torch.float32, output_loading_info=True, **labels, **_weights_of(gguf_file)
        ),
    )
    if new := sorted(info["missing_keys"]):
        say(f"not in the checkpoint, so new and random: {', '.join(new[:5])}{' ...' if len(new) > 5 else ''}")
    _give_pad_token(found, tokenizer, say)
    rows = found.get_input_embeddings().weight.shape[0]
    if len(tokenizer) > rows:
        raise ConfigError(
            f"model={model!r}: expected a tokenizer of at most {rows} tokens, as many as the model has embeddings, "
            f"found {len(tokenizer)}: does the tokenizer belong to this model?"
        )
    return Loaded(found, tokenizer)


def open_directory(
    directory: Path | str,
    *,
    recipe: Recipe | None = None,
    device: torch.device | str = "cpu",
    gguf_file: str | None = None,
    chat_template: str | None = None,
    is_reward: bool = False,
) -> Loaded:
    """Load a causal language model to read or write with, or a reward model, in eval mode.

    recipe: what it computes by; None: as its files have it, in their dtype. Raises ConfigError where there is none.
    """
    directory = str(directory)
    if not Path(directory).is_dir():
        raise ConfigError(
            f"{directory}: expected a run's folder or a Hugging Face directory, found none: look at the path"
        )
    dtype = "auto" if recipe is None else torch.float32
    weights = _weights_of(gguf_file)
    kind = AutoModelForSequenceClassification if is_reward else AutoModelForCausalLM
    model = _found(directory, lambda: kind.from_pretrained(directory, dtype=dtype, **weights))
    tokenizer = load_tokenizer(directory, gguf_file, chat_template)
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    model = model.to(device).eval()
    if recipe is not None:
        prepare(model, None, recipe.resolve(torch.device(device)))
    return Loaded(model, tokenizer)


def load_tokenizer(model: str, gguf_file: str | None = None, chat_template: str | None = None) -> Any:
    """The tokenizer of a directory or a name on the hub. Raises ConfigError."""
    where: dict[str, Any] = {"gguf_file": gguf_file} if gguf_file else {}
    tokenizer = _found(model, lambda: AutoTokenizer.from_pretrained(model, **where))
    if chat_template is not None:
        try:
            tokenizer.chat_template = Path(chat_template).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(
                f"chat_template={chat_template!r}: expected a Jinja file in UTF-8, found: {error}"
            ) from None
    return tokenizer


def check_chat_template(tokenizer: Any, model: str) -> None:
    """Raise ConfigError where messages cannot be written as text, or the template is no Jinja that renders them."""
    if not tokenizer.chat_template:
        raise ConfigError(
            f"model={model!r}: expected a tokenizer with a chat template, which messages need, found none: give one "
            "with --chat-template FILE.jinja, or write prompts and answers as text"
        )
    try:
        tokenizer.apply_chat_template([{"role": "user", "content": "a"}], tokenize=False, add_generation_prompt=True)
    except Exception as error:  # whatever Jinja and the template raise
        raise ConfigError(f"model={model!r}: expected a chat template that renders messages, found: {error}") from error


def end_tokens(loaded: Loaded) -> list[int]:
    """Ids that end an answer: the tokenizer's, and those that the model's generation goes by."""
    told = getattr(getattr(loaded.model, "generation_config", None), "eos_token_id", None)
    more = told if isinstance(told, list) else [told]
    return list(dict.fromkeys(id for id in (loaded.tokenizer.eos_token_id, *more) if id is not None))


def check_end_token(tokenizer: Any, model: str) -> None:
    """Raise ConfigError where a tokenizer has no token that ends an answer."""
    if tokenizer.eos_token_id is None:
        raise ConfigError(
            f"model={model!r}: expected a tokenizer with an end-of-sequence token, found none: set eos_token in its "
            "tokenizer_config.json"
        )


def check_plain(model: str, config: Any) -> None:
    """Raise ConfigError where a model's weights are stored quantized: their lost digits cannot be trained."""
    quantization = getattr(config, "quantization_config", None)
    if quantization is not None:
        told = quantization if isinstance(quantization, dict) else quantization.to_dict()
        raise ConfigError(
            f"model={model!r}: expected weights in 16 or 32 bits, found a checkpoint quantized by "
            f"{told.get('quant_method', 'an unknown method')}: take the model that it was made from, and a recipe"
        )


def context_of(model: Any) -> int | None:
    """Positions that a model has; None where it does not say."""
    return getattr(model.config.get_text_config(), "max_position_embeddings", None)


def length_for(model: Any, max_length: int) -> int:
    """`max_length`, or for 0 the default. Raises ConfigError where the model has fewer positions."""
    context = context_of(model)
    if max_length == 0:
        return min(_DEFAULT_LENGTH, context or _DEFAULT_LENGTH)
    if context is not None and max_length > context:
        raise ConfigError(f"max_length={max_length}: expected at most the model's context, {context}: lower it")
    return max_length


def _weights_of(gguf_file: str | None) -> dict[str, Any]:
    """What makes `from_pretrained` take the weights of a GGUF file in full."""
    if gguf_file is None:
        return {}
    whole = getattr(transformers, "GgufConfig", None)  # older versions know no other way
    return {"gguf_file": gguf_file} | ({"quantization_config": whole(dequantize=True)} if whole else {})


def _give_pad_token(model: Any, tokenizer: Any, say: Say) -> None:
    """Batches need a token to fill short sequences with. It is never learned: labels leave it out."""
    if tokenizer.pad_token_id is None:
        if tokenizer.eos_token is not None:
            tokenizer.pad_token = tokenizer.eos_token
            say(f"the tokenizer has no padding token: its end token {tokenizer.eos_token!r} pads")
        else:
            tokenizer.add_special_tokens({"pad_token": PAD})
            rows = model.get_input_embeddings().weight.shape[0]
            if len(tokenizer) > rows:
                model.resize_token_embeddings(len(tokenizer))
            grown = f", and the model has {len(tokenizer)} embeddings now" if len(tokenizer) > rows else ""
            say(f"the tokenizer has no padding token and no end token: {PAD!r} was added{grown}")
    model.config.get_text_config().pad_token_id = tokenizer.pad_token_id
    if getattr(model, "generation_config", None) is not None:
        model.generation_config.pad_token_id = tokenizer.pad_token_id


def _found(model: str, load: Callable[[], Any]) -> Any:
    try:
        return load()
    except (OSError, ValueError, KeyError, ImportError) as error:
        reason = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
        raise ConfigError(
            f"model={model!r}: {_REMEDY}, found: {reason} (transformers {transformers.__version__})"
        ) from error
