"""Text with and without drafts of a model's draft layers: tokens per second and accepted drafts, in turns.

    python benchmarks/drafts/drafting.py MODEL --text FILE [--draft-max 1 2 3] [--rounds 5] [--tokens 128] [--threads N]

MODEL is a GGUF or a checkpoint folder with draft layers; --text is cut into prompts of 64 tokens, one per round. Every round
writes the same answer (temperature 0) without drafts and with each number of them, so that they share the machine's state;
the table has medians, and how far the slowest round is from the fastest. Processor time, with --threads 1, says more than
tokens per second where other programs run.
"""

import argparse
import statistics
import time
from pathlib import Path

from ggufmill.runtime import load_model
from ggufmill.runtime.generation.generate import generate

PROMPT = 64


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--draft-max", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--threads", type=int)
    options = parser.parse_args()
    model = load_model(options.model, threads=options.threads)
    tokens = model.tokenizer.encode(options.text.read_text())
    if len(tokens) < PROMPT * (options.rounds + 1):
        parser.error(f"{options.text} has {len(tokens)} tokens; {options.rounds} rounds take {PROMPT * (options.rounds + 1)}")
    speeds: dict[int, list[float]] = {count: [] for count in (0, *options.draft_max)}
    processor: dict[int, list[float]] = {count: [] for count in speeds}
    drafted, accepted, passes = (dict.fromkeys(speeds, 0) for _ in range(3))
    for number in range(-1, options.rounds):  # the first round compiles what is not compiled yet
        prompt = tokens[PROMPT * (number + 1) : PROMPT * (number + 2)]
        texts = {}
        for count in speeds:
            session = model.session(PROMPT + options.tokens + 16)
            first = generate(model, prompt, 1, temp=0, ignore_eos=True, draft_max=count, session=session)
            first.text()
            start = time.process_time()
            answer = generate(
                model, [*prompt, *first.tokens], options.tokens, temp=0, ignore_eos=True, draft_max=count, session=session
            )
            texts[count] = answer.text()
            if number >= 0:
                t = answer.timings
                processor[count].append(1000 * (time.process_time() - start) / t.generated_tokens)
                speeds[count].append(t.generated_tokens / t.generated_seconds)
                drafted[count] += t.drafted_tokens
                accepted[count] += t.accepted_tokens
                passes[count] += t.generated_passes
        assert len(set(texts.values())) == 1, "drafts changed a text"
    plain, plain_time = statistics.median(speeds[0]), statistics.median(processor[0])
    columns = ("drafts", "accepted", "tokens per pass", "tokens/s", "x without", "slowest / fastest", "processor ms/token")
    print("|", " | ".join((*columns, "without / with")), "|")
    print("|---|---|---|---|---|---|---|---|")
    for count, measured in speeds.items():
        share = f"{accepted[count] / drafted[count]:.1%}" if drafted[count] else ""
        median = statistics.median(measured)
        per_pass = options.rounds * (options.tokens - 1) / passes[count]
        spread = f"{min(measured) / max(measured):.2f}"
        ms = statistics.median(processor[count])
        times = f"{ms:.2f} | {plain_time / ms:.2f}"
        print(f"| {count} | {share} | {per_pass:.2f} | {median:.1f} | {median / plain:.2f} | {spread} | {times} |")


if __name__ == "__main__":
    main()
