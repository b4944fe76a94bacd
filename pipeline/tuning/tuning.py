"""Norms and scales of a file that is being written come nearer to the predictions of the model that it is made of."""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from ...data_classes import dataclass
from ...errors import PlanError
from ...formats.file_range import range_checksum
from ...formats.gguf import open_shards
from ...imatrix.covariance.gradient_run import gradient_work
from ...jobs.execute import FinishTensors, OpenFiles
from ...jobs.plan import Plan
from ...operating_system.files import write_at
from ...quantize.gguf_source import gguf_source, planned_source
from ...runtime import Model, load_model
from ...runtime.output_gradients import group_cost
from ..common.figures import duration, size_text
from ..common.forecast import Forecast
from ..common.messages import note
from ..common.progress import WINDOWS, OnProgress, Stage
from ..common.reading import TORCH_BYTES, TORCH_STARTING
from .descent import FORWARDS, Descent, Progressed, judging

if TYPE_CHECKING:
    from ...runtime.backends.torch.parameter_gradients import ParameterGradients
    from ...runtime.backends.torch.tunable import TunableWeights


_STARTED = TORCH_BYTES + (62 << 20)  # bytes of the program
_SHARE = 0.05  # of the time that writing may take


class TuningState:
    """The file of a job. fingerprint: of its plan, and of what else decides its steps."""

    def __init__(self, path: Path, fingerprint: str):
        self.path, self._fingerprint = path, fingerprint
        self._next = 0.0  # when it is worth writing again

    def load(self) -> tuple[Progressed, dict[str, np.ndarray]] | None:
        """How far the job had come, and the numbers that changes are relative to; None where no such job was interrupted."""
        try:
            with np.load(self.path, allow_pickle=False) as stored:
                head = json.loads(str(stored["head"]))
                if head["fingerprint"] != self._fingerprint:
                    return None
                parts: dict[str, dict[str, np.ndarray]] = {part: {} for part in head["parts"]}
                for number, (part, name) in enumerate(head["names"]):
                    parts[part][name] = stored[str(number)]
        except (OSError, ValueError, KeyError, EOFError):  # also of a damaged file: the job begins again
            return None
        given = parts.pop("given")
        return Progressed(head["step"], head["losses"], parts), given

    def save(self, progressed: Progressed, given: Mapping[str, np.ndarray], *, now: bool = False) -> None:
        """Writes it, unless it was written too recently. Raises OSError."""
        started = time.monotonic()
        if not now and started < self._next:
            return
        parts = {**progressed.arrays, "given": given}
        names = [(part, name) for part, arrays in parts.items() for name in arrays]
        head = {"fingerprint": self._fingerprint, "step": progressed.step, "losses": progressed.losses}
        text = json.dumps(head | {"parts": list(parts), "names": names})
        written = self.path.with_name(f"{self.path.name}.part")
        with written.open("wb") as file:
            np.savez(file, head=np.array(text), **{str(i): parts[part][name] for i, (part, name) in enumerate(names)})
            file.flush()
            os.fsync(file.fileno())
        written.replace(self.path)
        finished = time.monotonic()
        self._next = finished + (finished - started) / _SHARE

    def forget(self) -> None:
        """Removes the file, once the output has its name."""
        self.path.unlink(missing_ok=True)
        self.path.with_name(f"{self.path.name}.part").unlink(missing_ok=True)


EPOCHS = 2  # times through the text
DATASET = "quantize.tuning.dataset"  # the key of the file that names the text


@dataclass
class Tuning:
    """How the tensors of a plan are tuned once all are written, before the files get their names.

    original     the model that they are made of; windows: int64 [n, n_ctx], one of eight of which judges
    norms_only   the scales of matrices stay
    threads      of the processor; device: of torch, which computes
    divergences  mean KL divergence on the windows that judge, known in the end: as written, and after each time through the
                 text; the file has the state of the least. tuned: tensors that were changed
    """

    original: Model
    windows: np.ndarray
    epochs: int = EPOCHS
    norms_only: bool = False
    threads: int = 1
    device: str = "cpu"
    divergences: list[float] = field(default_factory=list)
    tuned: int = 0

    def __post_init__(self) -> None:
        """Raises PlanError where no window judges."""
        if not judging(len(self.windows)).any():
            n_ctx = self.windows.shape[1]
            raise PlanError(
                f"the text fills {len(self.windows)} windows of {n_ctx} tokens; tuning needs 8, of which one judges"
            )

    def describe(self, quantised: Model, weights: TunableWeights) -> None:
        """Says what it takes."""
        count, windows = sum(x.size for x in weights.changes.values()), self.windows
        seconds, memory = self._takes(quantised, weights)
        note(
            f"tune: {count:,} numbers of {len(weights.vectors)} norms and {len(weights.matrices)} matrices, on {len(windows)} "
            f"windows of {windows.shape[1]} tokens, of which {int(judging(len(windows)).sum())} judge; about "
            f"{size_text(memory)} of memory beside both models ({size_text(self._kept_bytes)} for what the original makes of "
            f"the text), about {duration(seconds)}"
        )

    @property
    def _kept_bytes(self) -> int:
        """Of what the original makes of the text."""
        return 4 * self.windows.size * self.original.graph.n_embd

    def _takes(self, quantised: Model, weights: TunableWeights) -> tuple[float, int]:
        """Seconds, and bytes beside both models."""
        gradients, windows = self._gradients(quantised, weights), self.windows
        kept, tokens = self._kept_bytes, windows.shape[1]
        batch, cost, judges = min(4, len(windows)), group_cost(gradients, *windows.shape), int(judging(len(windows)).sum())
        memory = weights.nbytes + kept + batch * tokens * gradients.kept_bytes + cost.of(self.threads, batch)
        layers, head = gradient_work(gradients, cost, 1, tokens)
        forth = (self.epochs + 1) * judges + len(windows)  # windows without gradients; the head is computed by both models
        work = self.epochs * (len(windows) - judges) * layers + forth * layers / FORWARDS
        work += 2 * head * (self.epochs * len(windows) + judges)
        return work / gradients.products_per_second(batch), memory

    def added_to(self, other: Forecast, plan: Plan) -> Forecast:
        """A forecast of writing a plan with what tuning what it writes takes."""
        quantised = load_model(planned_source(self.original.source, plan), threads=self.threads)
        seconds, memory = self._takes(quantised, self.weights_of(quantised))
        parts = other.seconds and {**other.seconds, "torch": TORCH_STARTING / self.threads, "tune": seconds}
        if other.seconds is not None and "torch" in other.seconds:  # what was done before gave back what it had
            return replace(other, seconds=parts, memory=max(other.memory or 0, _STARTED + memory))
        return replace(other, seconds=parts, memory=(other.memory or 0) + TORCH_BYTES + memory)

    def finisher(self, plan: Plan, report: OnProgress, *, resume: bool) -> FinishTensors:
        """What changes the tensors of a plan that are written; resume: from where an interrupted one of this plan was."""
        return partial(self._finish, plan, report, resume)

    def weights_of(self, quantised: Model) -> TunableWeights:
        """What is tuned of a model. Raises PlanError where there is nothing, and for one that was not made of the original."""
        from ...runtime.backends.torch.tunable import TunableWeights

        ours, theirs = quantised.graph, self.original.graph
        if (ours.n_vocab, ours.architecture) != (theirs.n_vocab, theirs.architecture):
            raise PlanError(
                f"{quantised.source.path} is of {ours.architecture} with {ours.n_vocab:,} tokens, "
                f"{self.original.source.path} of {theirs.architecture} with {theirs.n_vocab:,}: it was not made of that model"
            )
        weights = TunableWeights(quantised.stored, quantised.graph, scales=not self.norms_only)
        if not weights.changes:
            raise PlanError(
                f"{quantised.source.path} has nothing to tune: no norms in f32, and no types whose scales are floats"
            )
        return weights

    def forget(self, plan: Plan) -> None:
        """Removes what an interrupted one would go on from."""
        self._state(plan).forget()

    def _state(self, plan: Plan) -> TuningState:
        text = hashlib.sha256(np.ascontiguousarray(self.windows).data).hexdigest()
        asked = f"{plan.fingerprint} {text} {self.epochs} {self.norms_only} {self.device.partition(':')[0]}"
        first = plan.files[0].path
        return TuningState(first.with_name(f"{first.name}.tuning"), asked)

    def _finish(
        self, plan: Plan, report: OnProgress, resume: bool, files: OpenFiles, record: Callable[[str, str], None]
    ) -> None:
        written = gguf_source(open_shards([file.part for file in plan.files]))
        quantised, state = load_model(written, threads=self.threads), self._state(plan)
        weights, found = self.weights_of(quantised), state.load() if resume else None
        if found is not None:  # of a file that may be changed already
            weights.take_given(found[1])
        given, hidden = weights.given, self._hidden(report)
        stage = Stage(report, "tune", 1000, "per mille")
        descent = Descent(
            self._gradients(quantised, weights), weights, self.windows, hidden, self.epochs,
            lambda share: stage.reach_share(1000 * share),
        )  # fmt: skip
        progressed = found[0] if found is not None else None
        last = Progressed()

        def on_step(progressed: Progressed) -> None:
            nonlocal last
            last = progressed
            state.save(progressed, given)

        self.divergences = descent.run(progressed, on_step)
        if last.step:
            state.save(last, given, now=True)
        self._say()
        self._write(files, plan, weights, record)

    def _gradients(self, quantised: Model, weights: TunableWeights) -> ParameterGradients:
        from ...runtime.backends.torch.parameter_gradients import ParameterGradients
        from ...runtime.backends.torch.weights import Weights

        exact, graph = Weights(self.original.stored, {}, exact=True), self.original.graph
        return ParameterGradients(quantised.graph, weights, graph, exact, self.threads, self.device)

    def _hidden(self, report: OnProgress) -> list[np.ndarray]:
        """What the original makes of each window, before its head."""
        stage = Stage(report, "original", len(self.windows), WINDOWS)
        with stage.watching(self.original):
            hidden = self.original.hidden_of_windows(self.windows)
        stage.reach(len(self.windows))
        return hidden

    def _write(self, files: OpenFiles, plan: Plan, weights: TunableWeights, record: Callable[[str, str], None]) -> None:
        """Writes what is tuned in place of what was written, where they differ."""
        at = {o.name: (o, location) for o, location in zip(plan.outputs, plan.locations, strict=True)}
        self.tuned = sum(bool(x.any()) for x in weights.changes.values())
        for name in weights.changes:
            output, location = at[name]
            data, offset = np.ascontiguousarray(weights.rows(name)).reshape(-1).data, location.offset
            while data:
                count = write_at(files.fds[location.file], data, offset)
                offset, data = offset + count, data[count:]
            record(name, range_checksum(plan.files[location.file].part, location.offset, output.nbytes))

    def _say(self) -> None:
        before, best = self.divergences[0], min(self.divergences)
        if best == before:
            note(
                f"tuning did not lower the KL divergence on the windows that judge ({before:.5f}): the weights stay as they are"
            )
        else:
            note(f"KL divergence on the windows that judge: {before:.5f} before, {best:.5f} after tuning")
