"""Train a step package: `torchrun --nproc-per-node N PKG/train.py`, or `python PKG/train.py` for one process.

A step calls `microbatch` for each of this rank's microbatches and then `finish` with the learning rate; everything
around that (which text, when to evaluate, when to save) is decided here, all tensor arithmetic is in the package. A run
is a function of its package and options: started again from a checkpoint it gives bit for bit the losses that it would
have given. torch's own generator is seeded anew before each step, so a checkpoint needs no generator state.

SIGTERM and Ctrl-C end the run after the step that is under way, with a checkpoint, on all ranks at the same step; a
second Ctrl-C ends it at once. Errors that a person can mend are printed once on every machine, without a traceback; the
exit codes are in `--help`.
"""

from __future__ import annotations

import math
import signal
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from threading import Thread
from types import FrameType
from typing import Any, NoReturn

import torch
from torch import Tensor

from mgraph import philox
from mgraph.errors import MgraphError, OptionError, PackageError, some_of
from mgraph.runtime import checkpoint, dropout, kept_products, mesh, outbox, v1
from mgraph.runtime.corpus import load_corpus
from mgraph.runtime.data import INPUTS, Batch, Corpus, Position, Stream, validation_batches, whole_rows
from mgraph.runtime.expert_load import LOADS, OVERRUN, OVERRUNS, expert_loads, overrun_text
from mgraph.runtime.export import check_export
from mgraph.runtime.handshake import Facts
from mgraph.runtime.log import Log, Record
from mgraph.runtime.lora import check_adapters
from mgraph.runtime.mesh import DATA_AXES, Mesh
from mgraph.runtime.options import Options, flag, parse
from mgraph.runtime.package import Package, State, load_package
from mgraph.runtime.routing import ROUTING, Decisions, Recording, Routers, Sizes, routers_of
from mgraph.runtime.sample import generate
from mgraph.runtime.saving import Saver
from mgraph.runtime.schedule import learning_rate
from mgraph.runtime.start import bring_up, end_at_once
from mgraph.runtime.state import create_state
from mgraph.runtime.tokenizer import Tokenizer, load_tokenizer, tokenizer_files
from mgraph.runtime.transfer import NOTES, export, export_adapter, initialise, is_exported, note_export
from mgraph.runtime.weights import model_tensors

ENTRIES = ("microbatch", "finish", "evaluate", "predict")
LAST = "last"
"""The entry, where there is one, of the last microbatch of a step and its end."""
"""What a package must have to be trained."""

FORM = "i64[B, S]"
"""What each input is that the data gives."""

HINTS = {"loss_mask": "compile it without --loss-mask: labels of -100 say which positions count"}
"""What to do about an input that the data does not give."""

CHECKPOINTS = "checkpoints"
"""The directory of a run's checkpoints, in that of the run."""

SUMMARY_STEPS = 20
"""The train loss of the summary is the mean over this many last steps: that of a single batch is noise."""


_FAILED, _STOP = 1, 2
"""What ranks tell each other after a step."""

OF_A_MACHINE = ("data", "tokenizer", "chat_template", "threads")
"""Options that ranks may be given differently: where files are. What they hold is compared when it has been read."""

SAME_RUN = ("out", "resume")
"""Options that say where a run is, not how it goes on."""


_COUNTS = (LOADS, OVERRUNS)
"""Outputs of `finish` that are no numbers of a step."""


class BudgetError(MgraphError):
    """Tokens found no room on their way to experts: what the step computed is wrong."""


class NonFiniteLossError(MgraphError):
    """The loss or the norm of the gradient became infinite or not a number."""

    exit_code = 3


def main(package_dir: Path | str, arguments: Sequence[str] | None = None) -> NoReturn:
    """Train the package with the options of the command line, then exit the process with a code of `--help`."""
    code = 0
    try:
        run(parse(arguments, Path(sys.argv[0]).name), Path(package_dir))
    except MgraphError as error:
        code = error.exit_code
        if mesh.is_first_of_machine():
            print(error, file=sys.stderr, flush=True)
    except KeyboardInterrupt:  # before the first step, or a second time
        end_at_once()
    mesh.stop()
    sys.exit(code)


@torch.no_grad()
def run(options: Options, package_dir: Path) -> None:
    """A whole training run in this process. Raises `MgraphError`, the same one on all ranks."""
    opened: list[Package] = []

    def prepare() -> tuple[torch.device, dict[str, int], Facts]:
        device = mesh.choose_device(options.device)
        if device.type == "cuda":
            torch.cuda.set_device(device)
        package = _open(package_dir, device, options)
        opened.append(package)
        _check_places(options, package)
        for option, target in _exports(options):
            if not _is_exported(option, target, options, package):
                check_export(target, flag(option))
        if options.export_adapter is not None:
            check_adapters(package.state_specs, str(package.path))
        axes = mesh.bind_axes(package.manifest["mesh"], mesh.environment()[1])
        return device, axes, _facts(package, options) if mesh.environment()[1] > 1 else {}

    where = mesh.start(prepare)
    where.declare(opened[0].manifest["mesh"])
    torch.set_num_threads(options.threads or mesh.share_of_threads())
    with ExitStack() as stack:
        stop = stack.enter_context(StopSignal())
        libraries = _bring_up(opened[0]) if where.device.type == "cuda" else None
        trainer = where.together(lambda: Trainer.create(options, opened[0], where))
        where.agree({name: str(value) for name, value in trainer.identity().items()})
        trainer.resume_or_refuse()
        trainer.begin_decisions()
        trainer.log = where.together(lambda: Log(trainer.out, trainer.step, options.steps) if where.is_first else None)
        if trainer.log is not None:
            stack.callback(trainer.log.close)
        trainer.announce()
        stack.enter_context(trainer.saver)
        if libraries is not None:
            libraries.join()
        if trainer.train(stop):
            trainer.conclude()


def _bring_up(package: Package) -> Thread:
    """Libraries get ready while the state is drawn."""
    chosen = [choice["provider"] for choice in package.manifest.get("providers", ())]
    return bring_up(package.device, attention="cudnn" in chosen)


def _open(path: Path, device: torch.device, options: Options) -> Package:
    ranges = ("nvtx" if device.type == "cuda" else "record") if options.nvtx else False
    graphs = not options.no_cuda_graphs
    tuned = options.tune_products
    outbox.use(options.copy_tokens)
    package = load_package(path, device, options.strict, options.jit, graphs, options.poison, ranges, tuned=tuned)
    absent = [name for name in ENTRIES if name not in package.entries]
    if absent:
        raise PackageError(
            f"the package cannot be trained: it has no entry '{absent[0]}' (it is for {package.manifest['kind']})",
            where=str(package.path),
            hint="mgraph compile MODEL --for train",
        )
    if options.non_finite == "skip" and "skipped" not in package.manifest["entries"]["finish"]["outputs"]:
        raise PackageError(
            "the package cannot skip steps: its finish updates the parameters whatever the loss is",
            where=str(package.path),
            hint="compile it again with this version of mgraph, or --non-finite raise",
        )
    compiled = package.manifest.get("fingerprint", {}).get("options", {})
    if options.non_finite == "skip" and compiled.get("check_finite") == "loss":
        raise PackageError(
            "the package cannot skip steps whose gradients are not finite: it looks at the loss alone",
            where=str(package.path),
            hint="compile it with --check-finite gradients, or --non-finite raise",
        )
    _check_inputs(package)
    for option in ("record_routing", "replay_routing"):
        if getattr(options, option) is not None:
            routers_of(package, flag(option))
    package.check_size("B", options.batch_size, "--batch-size")
    package.check_size("S", options.seq_len, "--seq-len")
    return package


def _facts(package: Package, options: Options) -> Facts:
    """What all ranks must agree on, options first: they say most."""
    given = {flag(name): str(value) for name, value in vars(options).items() if name not in OF_A_MACHINE}
    return given | package.facts()


def _check_inputs(package: Package) -> None:
    """Refuse a package that takes what no batch has, or takes it in another form."""
    listed = {i["name"]: f"{i['dtype']}[{', '.join(map(str, i['shape']))}]" for i in package.manifest["inputs"]}
    for entry in ("microbatch", "evaluate", "predict"):
        given = [name for name in INPUTS if name != "labels" or entry != "predict"]
        for name in package.manifest["entries"][entry]["inputs"]:
            if name == ROUTING and Routers.of(package) is not None:
                continue
            if name not in given or listed[name] != FORM:
                raise PackageError(
                    f"{entry} takes the input {name} {listed[name]}; the data gives {', '.join(given)}, each {FORM}",
                    where=str(package.path),
                    hint=HINTS.get(name, "change inputs(B, S) in the model's file, and compile again"),
                )


def sizes_note(manifest: Mapping[str, Any], options: Options) -> str:
    """What to say where attention's kernels were chosen for batches of other sizes; "" where they were not."""
    compiled = manifest.get("fingerprint", {}).get("options", {})
    chosen = [c for c in manifest.get("providers", ()) if c["op"].startswith("attention") and c.get("next")]
    given, told = (options.batch_size, options.seq_len), (compiled.get("batch"), compiled.get("seq"))
    if not chosen or None in told or all(1 / 2 < size / other < 2 for size, other in zip(given, told, strict=True)):
        return ""
    return (
        f"note: attention's kernels were chosen for {told[0]} x {told[1]} tokens; for {given[0]} x {given[1]}"
        f" others may be faster: mgraph compile --batch {given[0]} --seq {given[1]}"
    )


def _directory(options: Options, package: Package) -> Path:
    """Where the run is."""
    return options.out or Path("runs") / package.manifest["name"]


def _exports(options: Options) -> list[tuple[str, Path]]:
    """The options that ask for something to be written at the end, and where to."""
    return [(option, target) for option in NOTES if (target := getattr(options, option)) is not None]


def _check_places(options: Options, package: Package) -> None:
    """Raise OptionError where the run would be a file, or what is exported would lie around it or what is besides."""
    out = _directory(options, package)
    if (file := next((place for place in (out, *out.parents) if place.is_file()), None)) is not None:
        raise OptionError(f"--out {out}: {file} is a file", hint="a directory, which need not be there yet")
    places = {"--out": out} | {flag(option): target for option, target in _exports(options)}
    for option, target in _exports(options):
        for other, place in places.items():
            if other != flag(option) and place.resolve().is_relative_to(target.resolve()):
                raise OptionError(
                    f"{flag(option)} {target}: {other} {place} is the same place or lies in it",
                    hint="give each a directory of its own",
                )


def _is_exported(option: str, target: Path, options: Options, package: Package) -> bool:
    """Whether the run that is to be gone on with has made its last step and exported what the option asks for."""
    out = _directory(options, package)
    found = checkpoint.latest(out / CHECKPOINTS) if options.resume else None
    return found is not None and found.step >= options.steps and is_exported(option, target, out, found.step)


def _decisions(options: Options, package: Package, where: Mesh, microbatches: int) -> Decisions | None:
    """What the run does with the decisions of routers; None where its package has none to take."""
    routers = Routers.of(package)
    if routers is None:
        return None
    sizes = Sizes(options.batch_size, options.seq_len, microbatches)
    record, replay = (
        None if path is None else Recording(path, routers, sizes)
        for path in (options.record_routing, options.replay_routing)
    )
    writes = all(where.index(axis) == 0 for axis in where.axes if axis not in DATA_AXES)
    return Decisions(routers, record, replay, where.data_rank, where.data_size, writes)


class StopSignal:
    """While entered, SIGTERM and the first Ctrl-C set `requested` instead of ending the process."""

    def __init__(self) -> None:
        self.requested = False
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> StopSignal:
        for number in (signal.SIGTERM, signal.SIGINT):
            self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.requested and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.requested = True


@dataclass
class Trainer:
    """A run between two steps: everything that the next step needs."""

    options: Options
    package: Package
    mesh: Mesh
    tokenizer: Tokenizer
    corpus: Corpus
    stream: Stream
    validation: list[Batch]
    state: State
    out: Path
    microbatches: int
    saver: Saver
    decisions: Decisions | None = None
    step: int = 0
    log: Log | None = None
    validation_loss: float = math.nan
    changed: list[str] = field(default_factory=list)
    # Losses stay on the device until they are reported: reading one waits for the device.
    unread: list[tuple[int, float, dict[str, Tensor]]] = field(default_factory=list)
    unread_since: float = field(default_factory=time.perf_counter)

    @classmethod
    def create(cls, options: Options, package: Package, where: Mesh) -> Trainer:
        """A run at step 0."""
        rank, num_ranks = where.data_rank, where.data_size
        microbatches = options.accumulate or num_ranks
        if microbatches % num_ranks:
            raise OptionError(
                f"--accumulate {microbatches} microbatches cannot be shared evenly by {num_ranks} data-parallel ranks",
                hint=f"a multiple of {num_ranks}",
            )
        if package.one_microbatch and microbatches > num_ranks:
            raise OptionError(
                f"--accumulate {microbatches}: a step of this package has one microbatch on each of {num_ranks} ranks",
                hint=f"--accumulate {num_ranks}, or compile it again without --one-microbatch",
            )
        # Weights that will be read, of --init or of a checkpoint, need not be drawn.
        given = {s.name for s in model_tensors(package.state_specs)} if options.init is not None else set()
        tokenizer = load_tokenizer(options.tokenizer, package.vocab_size)
        takes_segments = "segment_ids" in package.manifest["entries"]["microbatch"]["inputs"]
        corpus = load_corpus(options, tokenizer, takes_segments)
        batch, out = options.batch_size, _directory(options, package)
        return cls(
            options=options,
            package=package,
            mesh=where,
            tokenizer=tokenizer,
            corpus=corpus,
            stream=Stream(corpus.train, batch, options.seed),
            validation=validation_batches(corpus.validation, batch, options.eval_batches, rank, num_ranks),
            state=create_state(package.state_specs, options.seed, where.device, given, where),
            out=out,
            microbatches=microbatches,
            saver=Saver(out / CHECKPOINTS, package.state_specs, where, options.keep),
            decisions=_decisions(options, package, where, microbatches),
        )

    def identity(self) -> dict[str, Any]:
        """What must be the same for a resumed run to be the same run."""
        return {
            **self.corpus.identity,
            "--tokenizer": self.tokenizer.name,
            "--seq-len": self.options.seq_len,
            "--seed": self.options.seed,
            "--init": str(self.options.init) if self.options.init is not None else None,
        }

    def resume_or_refuse(self) -> None:
        """Go on from the newest checkpoint, or refuse to write over one when that was not asked for.

        A run that has none begins with the weights of `--init`, where that is given.
        """
        found = self.mesh.together(lambda: checkpoint.latest(self.out / CHECKPOINTS))
        if found is None:
            init = self.options.init
            if init is not None:
                self.mesh.together(lambda: initialise(init, self.package, self.state, self.mesh.is_first, self.mesh))
            return
        if not self.options.resume:
            raise OptionError(
                f"{self.out} already holds a run, saved at step {found.step}",
                hint="--resume to go on with it, another --out, or remove the directory",
            )
        checkpoint.check_same(found.run["identity"], self.identity(), found.path, "option")
        checkpoint.load(found, self.state, self.package.state_specs, self.mesh)
        self.step = found.step
        self.stream.position = Position(*found.run["position"])
        self.changed = self._changes(found.run["options"])

    def _changes(self, saved: dict[str, str]) -> list[str]:
        """The options that differ from those of the run that is gone on with, as `--lr 0.01 (before: 0.02)`."""
        now = {name: str(value) for name, value in vars(self.options).items() if name not in SAME_RUN}
        return [
            f"{flag(name)} {value} (before: {saved[name]})"
            for name, value in now.items()
            if saved.get(name, value) != value
        ]

    def begin_decisions(self) -> None:
        """Check the decisions that are replayed, make room for those that are recorded, and seed the noise."""
        decisions, options = self.decisions, self.options
        if decisions is not None:
            self.mesh.together(lambda: decisions.begin(self.step + 1, options.steps, self.mesh.is_first))
        if options.noise_seed >= 0:
            dropout.seed(self.state, options.noise_seed)

    def announce(self) -> None:
        """Say what is going to run."""
        if self.log is None:
            return
        numbers = sum(spec.trainable * math.prod(spec.shape) for spec in self.package.state_specs)
        tokens = self.microbatches * self.options.batch_size * self.options.seq_len
        start = f", going on after step {self.step}" if self.step else ""
        self.log.message(
            f"{self.package.manifest['name']}: {numbers:,} trained parameters on {self.mesh.world_size} "
            f"process{'es' * (self.mesh.world_size > 1)} ({self.mesh.device.type}), {tokens:,} tokens per step{start}"
        )
        for note in self.corpus.notes:
            self.log.message(note)
        if self.changed:
            self.log.message(f"note: resumed with {', '.join(self.changed)}")
        if self.step >= self.options.steps:
            self.log.message(f"nothing is left to train: saved at step {self.step}, --steps {self.options.steps}")
        if self.options.tune_products:
            self.log.message(
                "note: --tune-products times kernels in the first step, some 2 s for each shape of a product that "
                f"{self.package.path / kept_products.FILE} has no choice for yet"
            )
        if self.mesh.device.type == "cuda" and (note := sizes_note(self.package.manifest, self.options)):
            self.log.message(note)
        if self.package.edited:
            self.log.message(f"note: edited since it was compiled: {some_of(self.package.edited)}")

    def train(self, stop: StopSignal) -> bool:
        """Run the steps that are left; False if a signal ended the run before the last."""
        options = self.options
        self.unread_since = time.perf_counter()
        while self.step < options.steps:
            self.train_step()
            # Ranks see a signal, or that a save has failed, at different moments: they agree on the step.
            news = self.mesh.largest(_STOP if stop.requested else _FAILED if self.saver.failed else 0)
            if news == _FAILED:
                self.saver.wait()
            stopped = news == _STOP
            last = self.step == options.steps
            saving = last or stopped or _due(self.step, options.save_every)
            evaluating = not stopped and (last or _due(self.step, options.eval_every))
            if saving or evaluating or _due(self.step, options.log_every):
                self.report()
            if evaluating:
                self.evaluate()
            if saving:
                path = self.save()
            if stopped:
                self.saver.wait()
                if self.log is not None:
                    self.log.message(f"stopped after step {self.step}, saved {path}; go on with --resume")
                return False
        return True

    def train_step(self) -> None:
        """One optimizer step: this rank's microbatches and its end, which may go with the last of them."""
        rank, num_ranks = self.mesh.data_rank, self.mesh.data_size
        torch.manual_seed(philox.key_from(self.options.seed, "step", self.step, rank)[0])
        batches = self._batches()
        options, decisions, step = self.options, self.decisions, self.step + 1
        rate = learning_rate(self.step, options.steps, options.lr, options.min_lr, options.warmup, options.decay)
        lr = torch.tensor(rate, dtype=torch.float32, device=self.mesh.device)
        joined = LAST in self.package.manifest["entries"]
        outputs: dict[str, Tensor] = {}
        taken: list[Tensor] = []
        for index, batch in enumerate(batches):
            dropout.place(self.state, self.step, (index * num_ranks + rank) * options.batch_size)
            if joined and index + 1 == self.microbatches // num_ranks:
                made = outputs = self.call(LAST, {**batch, "lr": lr})
            else:
                made = self.call("microbatch", batch)
            if ROUTING in made:
                routing = made.pop(ROUTING)
                # The next microbatch may write where it lies.
                taken += [routing.clone()] if decisions is not None and decisions.record is not None else []
        if not joined:
            outputs = self.package.call("finish", self.state, lr)
        if decisions is not None and decisions.record is not None:
            self.mesh.together(lambda: decisions.take(step, list(batches), taken))
        self.step += 1
        # Outputs may be views of state that the next step writes.
        self.unread.append((self.step, rate, {name: value.detach().clone() for name, value in outputs.items()}))

    def _batches(self) -> Iterable[Batch]:
        """This rank's microbatches of the next step, one by one, or all at once where decisions belong to them."""
        decisions, step = self.decisions, self.step + 1
        batches = self.stream.microbatches(self.microbatches, self.mesh.data_rank, self.mesh.data_size)
        if decisions is None or (decisions.record is None and decisions.replay is None):
            return batches
        whole = list(batches)
        return self.mesh.together(lambda: decisions.given(step, whole))

    def call(self, entry: str, batch: Batch) -> dict[str, Tensor]:
        """Call an entry with those inputs of a batch that it takes."""
        names = self.package.manifest["entries"][entry]["inputs"]
        if self.decisions is not None and ROUTING in names and ROUTING not in batch:
            batch = {**batch, ROUTING: self.decisions.routers.free(batch["tokens"])}
        return self.package.call(entry, self.state, *(batch[name].to(self.mesh.device) for name in names))

    def _expert_loads(self, outputs: dict[str, Tensor]) -> Record:
        """What a step says of the load of experts; nothing where its package does not count."""
        tokens = self.microbatches * self.options.batch_size * self.options.seq_len
        return expert_loads(outputs[LOADS], self.package.manifest[LOADS], tokens) if LOADS in outputs else {}

    def _check_room(self) -> None:
        """Raises `BudgetError` at a step in which tokens found no room on their way to experts."""
        for step, _, outputs in self.unread:
            if OVERRUNS in outputs and (text := overrun_text(outputs[OVERRUNS], self.package.manifest[OVERRUNS], step)):
                hint = "--resume goes on from the last checkpoint, if there is one"
                raise BudgetError(text, hint=f"compile with a larger --expert-budget; {hint}")

    def _check_room_beside(self, what: str) -> None:
        """The same of what the state has counted since the last step."""
        lost = sum(int(t.sum()) for name, t in self.state.items() if name.endswith(OVERRUN))
        if self.mesh.largest(lost):
            text = f"step {self.step}: tokens of the {what} found no room on their way to experts"
            raise BudgetError(text, hint="compile with a larger --expert-budget")

    def report(self) -> None:
        """Read and log the results of the steps since the last report.

        Raises `NonFiniteLossError` at a step that was not finite, unless such steps are skipped. An overflow of
        gradients whose loss is scaled is no such step: it is how the scale is found.
        """
        self._check_room()
        results = [
            {
                "step": step,
                "learning_rate": rate,
                **{name: value.item() for name, value in outputs.items() if name not in _COUNTS},
            }
            for step, rate, outputs in self.unread
        ]
        tokens = len(results) * self.microbatches * self.options.batch_size * self.options.seq_len
        speed = round(tokens / (time.perf_counter() - self.unread_since), 1)
        problems = [_problem(result) if self.options.non_finite == "raise" else "" for result in results]
        bad = next((index for index, problem in enumerate(problems) if problem), None)
        finite = [{k: v for k, v in result.items() if math.isfinite(v)} for result in results[:bad]]
        loads = [self._expert_loads(outputs) for _, _, outputs in self.unread]
        records: list[Record] = [
            {**r, "tokens_per_second": speed, **load} for r, load in zip(finite, loads, strict=False)
        ]
        self.unread = []
        self.mesh.together(lambda: self.log.train(records) if self.log is not None and records else None)
        if bad is not None:
            raise NonFiniteLossError(
                problems[bad],
                hint="a lower --lr or a longer --warmup; --non-finite skip leaves such steps out; "
                "--resume goes on from the last checkpoint, if there is one",
            )
        self.unread_since = time.perf_counter()

    def evaluate(self) -> None:
        """Mean loss over the validation batches, over all ranks and tokens."""
        total = torch.zeros(2, dtype=torch.float64, device=self.mesh.device)
        for batch in self.validation:
            outputs = self.call("evaluate", batch)
            total += torch.stack([outputs["loss_sum"].double(), outputs["count"].double()])
        for axis in DATA_AXES:
            v1.all_reduce([total], axis)
        loss, count = total.tolist()
        self._check_room_beside("evaluation")
        self.validation_loss = loss / count
        self.mesh.together(
            lambda: self.log.validation(self.step, self.validation_loss) if self.log is not None else None
        )
        self.unread_since = time.perf_counter()

    def read_by_servers(self) -> list[tuple[str, Path | None]]:
        """Files that whoever serves the run reads besides, by their options."""
        return [(name, getattr(self.options, name)) for name in ("tokenizer", "chat_template")]

    def save(self) -> Path:
        """Begin to write a checkpoint of this step; where it will be."""
        position = self.stream.position
        record = {
            "identity": self.identity(),
            "position": [position.epoch, position.row],
            "options": {name: str(value) for name, value in vars(self.options).items()},
            "places": {name: None if path is None else str(path.absolute()) for name, path in self.read_by_servers()},
        }
        path = self.saver.save(self.step, self.state, record)
        self.unread_since = time.perf_counter()
        return path

    def conclude(self) -> None:
        """After the last step: the exported weights, the sample, the picture, and the line that sums the run up."""
        if math.isnan(self.validation_loss):  # resumed at the end: no step of this process was evaluated
            self.evaluate()
        for option, target in _exports(self.options):
            self._export(option, target)
        text = self.sample() if self.options.sample_length else None
        self.mesh.together(lambda: self._write_results(text))

    def sample(self) -> str:
        """Text that the model writes after the prompt. All ranks run it, since predict may be sharded."""
        options = self.options
        text = generate(
            lambda tokens: self.call("predict", whole_rows(tokens))["logits"],
            self.tokenizer,
            options.sample_prompt,
            options.sample_length,
            window=options.seq_len,
            least=(self.package.bounds("B")[0], self.package.bounds("S")[0]),
            multiple=self.package.multiple("S"),
            seed=options.seed,
            temperature=options.temperature,
            top_k=options.top_k,
            device=self.mesh.device,
        )
        self._check_room_beside("sample")
        return text

    def _write_results(self, text: str | None) -> None:
        if self.log is None:
            return
        per_byte = self.corpus.tokens_per_byte
        if text is not None:
            self.log.write("sample.txt", text + "\n")
            print(f"--- sample\n{text}\n---", flush=True)
        self.log.picture(self.corpus.unigram_entropy / per_byte, self.package.manifest["name"])
        losses = [loss for _, loss in self.log.points("loss")][-SUMMARY_STEPS:]
        train_loss = sum(losses) / len(losses) if losses else math.nan
        print(
            f"train loss {train_loss * per_byte:.4f}  validation loss {self.validation_loss * per_byte:.4f}  "
            f"unigram entropy {self.corpus.unigram_entropy:.4f} nats/byte",
            flush=True,
        )

    def _export(self, option: str, target: Path) -> None:
        """The first rank writes what an option asks for, which all put together, unless it is there already."""
        options, first = self.options, self.mesh.is_first
        there = self.mesh.together(lambda: first and _is_exported(option, target, options, self.package))
        if self.mesh.largest(there):
            if self.log is not None:
                self.log.message(f"what {flag(option)} writes after step {self.step} is in {target} already")
            return
        if self.log is not None:
            self.log.end_of_steps()

        def write() -> None:
            if option == "export":
                beside = tokenizer_files(options.tokenizer, options.chat_template)
                export(target, options.export_dtype, self.package, self.state, beside, self.mesh)
            else:
                export_adapter(target, options.export_dtype, self.package, self.state, options.init, self.mesh)
            if first:
                note_export(option, target, self.out, self.step)

        self.mesh.together(write)


def _problem(result: Record) -> str:
    """What is not finite about a step's results, or nothing."""
    checked = {"loss": "loss", "grad_norm": "gradient norm"}
    if "loss_scale" in result:
        del checked["grad_norm"]
    wrong = [name for name in checked if not math.isfinite(result[name])]
    return f"the {checked[wrong[0]]} of step {result['step']} is {result[wrong[0]]}" if wrong else ""


def _due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0
