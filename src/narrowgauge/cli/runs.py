"""Commands that read a run, or a Hugging Face directory: `eval`, `generate`, `export`."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence

from narrowgauge.cli import answers
from narrowgauge.cli.arguments import Parser
from narrowgauge.integrations.finetune_run import FinetuneRun

_NOT_OURS = (
    "for fine-tuning runs and Hugging Face directories, which have a config.json: leave it out, or look at the path"
)


def evaluate(argv: Sequence[str]) -> int:
    """Print loss, perplexity and bits per byte of a run's model on validation text."""
    parser = _run_parser(
        "eval",
        "Loss and perplexity: of a run of `train` on its validation split, with bits per byte; of a fine-tuning run\n"
        "or a Hugging Face directory on held-out JSON Lines. A run computes in its own precision.",
        [
            "narrowgauge eval runs/NAME",
            "narrowgauge eval runs/NAME --batches 0 --json",
            "narrowgauge eval runs/NAME --corpus 'texts/*.txt'",
            "narrowgauge eval my-model --data held-out.jsonl --recipe narrow8",
        ],
    )
    parser.add_argument("--corpus", help="another corpus, read in the run's tokens (default: the run's)")
    parser.add_argument("--batches", type=int, help="batches to read; 0: all (default: as many as in training)")
    parser.add_json_option()
    answers.add_evaluation_options(parser)
    arguments = parser.parse(argv)
    if answers.is_directory_of_model(arguments.run):
        return answers.evaluate_directory(arguments)
    only = ("data", "batch_size", "max_length", "loss_on", "recipe", "chat_template", "gguf_file")
    answers.refuse_options(arguments, only, _NOT_OURS)
    if arguments.batches is not None and arguments.batches < 0:
        parser.error(f"--batches: expected 0 or more, found {arguments.batches}")

    from narrowgauge.cli.console import print_json, print_table
    from narrowgauge.train.trained import Trained

    trained = Trained.open(arguments.run, arguments.checkpoint, arguments.device)
    dataset = trained.dataset(arguments.corpus, _say)
    batches = trained.config.eval_batches if arguments.batches is None else arguments.batches
    found = trained.evaluate(dataset, batches or None)
    figures = {
        "run": str(trained.folder.path),
        "step": trained.step,
        "recipe": trained.config.build_recipe().at(trained.step).name,
        "corpus": arguments.corpus or trained.config.data.corpus,
        "loss": found.loss,
        "perplexity": found.perplexity,
        "bits_per_byte": found.bits_per_byte,
        "tokens": found.tokens,
        "text_bytes": found.text_bytes,
    }
    if arguments.json:
        print_json(figures)
    else:
        print_table("", ["", ""], [(name.replace("_", " "), value) for name, value in figures.items()])
    return 0


def generate(argv: Sequence[str]) -> int:
    """Print the prompt and what the run's model writes after it."""
    parser = _run_parser(
        "generate",
        "Continue a prompt with the model of a run or a Hugging Face directory, or answer a file of AlpacaEval's or\n"
        "MT-Bench's questions.",
        [
            'narrowgauge generate runs/NAME --prompt "def main("',
            'narrowgauge generate runs/NAME --prompt "import " --temperature 0 --tokens 32',
            'narrowgauge generate my-model --chat --prompt "What is 2 + 3?"',
            "narrowgauge generate my-model --batch question.jsonl --output model_answer/my-model.jsonl",
            "narrowgauge generate my-model --batch alpaca_eval.json --output outputs.json --name my-model",
        ],
    )
    asked = parser.add_mutually_exclusive_group(required=True)
    asked.add_argument("--prompt", help="the text to continue; may be empty for a run of `train`")
    asked.add_argument("--batch", metavar="FILE", help="questions of AlpacaEval (JSON) or MT-Bench (JSON Lines)")
    parser.add_argument("--tokens", type=int, help="write at most this many (default: 128; to questions 1024)")
    parser.add_argument(
        "--temperature", type=float, help="0: the likeliest token (default: 0.8; to questions what the benchmark says)"
    )
    parser.add_argument("--top-k", type=int, help="sample among the k likeliest (default: 50; to questions all)")
    parser.add_argument("--seed", type=int, default=0, help="of sampling (default: %(default)s)")
    answers.add_generation_options(parser)
    arguments = parser.parse(argv)
    if arguments.tokens is not None and arguments.tokens < 1:
        parser.error(f"--tokens: expected 1 or more, found {arguments.tokens}")
    if answers.is_directory_of_model(arguments.run):
        return answers.generate_from_directory(arguments)
    only = ("batch", "chat", "output", "name", "batch_size", "recipe", "chat_template", "gguf_file")
    answers.refuse_options(arguments, only, _NOT_OURS)

    from narrowgauge.train.sample import sample_text
    from narrowgauge.train.trained import Trained

    # bytes that the locale cannot read come as lone surrogates, which are no text
    prompt = os.fsencode(arguments.prompt).decode("utf-8", errors="replace")
    trained = Trained.open(arguments.run, arguments.checkpoint, arguments.device)
    text = sample_text(
        trained.model,
        trained.tokenizer,
        prompt,
        128 if arguments.tokens is None else arguments.tokens,
        temperature=0.8 if arguments.temperature is None else arguments.temperature,
        top_k=50 if arguments.top_k is None else arguments.top_k,
        seed=arguments.seed,
    )
    print(prompt + text)
    return 0


def export(argv: Sequence[str]) -> int:
    """Write a run's model as a Hugging Face directory."""
    parser = _run_parser(
        "export",
        "Write a run's model as a Hugging Face directory, that of a run of `train` in the Llama layout:\n"
        "config.json, model.safetensors, tokenizer.json. AutoModelForCausalLM.from_pretrained loads it.\n"
        "The weights are the parameters' full values, residuals and masters included, each rounded once.",
        [
            "narrowgauge export runs/NAME hf-model",
            "narrowgauge export runs/NAME hf-model --format fp8",
            "narrowgauge export runs/NAME hf-model --checkpoint step-000100",
        ],
    )
    parser.add_argument("directory", metavar="DIR", help="a new or empty directory")
    parser.add_argument(
        "--format",
        default="bf16",
        choices=["bf16", "fp32", "fp8"],
        help="of the weights; fp8: linear layers in blocks of 128x128, as transformers and vLLM read them "
        "(default: %(default)s)",
    )
    arguments = parser.parse(argv)
    if FinetuneRun.is_at(arguments.run):
        return answers.export_run(arguments)

    from narrowgauge.integrations.huggingface import export_llama
    from narrowgauge.train.trained import Trained

    trained = Trained.open(arguments.run, arguments.checkpoint, arguments.device, prepared=False)
    directory = export_llama(trained.model, trained.tokenizer, arguments.directory, arguments.format)
    print(f"wrote {directory}: step {trained.step} of {trained.folder.path}, weights in {arguments.format}")
    if arguments.format == "fp8":
        config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
        kept = config["quantization_config"]["modules_to_not_convert"]
        blocks = [name for name in kept if "." in name]
        print(f"in bf16: embedding, norms, lm_head, and {len(blocks)} layers whose sizes are no multiples of 128")
    return 0


def _run_parser(command: str, description: str, examples: Sequence[str]) -> Parser:
    parser = Parser(command, description, examples)
    what = "the run's folder" if command == "export" else "the run's folder, or a Hugging Face directory"
    parser.add_argument("run", metavar="RUN" if command == "export" else "RUN|DIR", help=what)
    parser.add_argument("--checkpoint", help="a checkpoint's name, or last-good (default: the newest)")
    parser.add_argument("--device", help="cpu, cuda or auto (default: as in training)")
    return parser


def _say(message: str) -> None:
    print(f"{message} ...", file=sys.stderr)
