"""What `--data` names: text, or examples to learn from; with its split, and what there is to say about it."""

from __future__ import annotations

import hashlib
from dataclasses import fields
from pathlib import Path

import numpy as np

from mgraph import philox
from mgraph.errors import DataError, OptionError
from mgraph.runtime.chat import load_template
from mgraph.runtime.data import VALIDATION, Corpus, epoch_key, shuffled
from mgraph.runtime.examples import SUFFIX, Census, Reading, read_examples
from mgraph.runtime.options import Options, flag
from mgraph.runtime.packing import PackedExamples
from mgraph.runtime.text import BUILTIN, files_of, load_text, unigram_entropy
from mgraph.runtime.tokenizer import Tokenizer

FOR_EXAMPLES = ("chat_template", "end_of_text", "pack", "long")
"""Options that mean nothing for text."""

CLOCK = "note: the chat template may write the date: a run that is resumed on another day may see other tokens"
"""Said where a template asks for the time."""


def load_corpus(options: Options, tokenizer: Tokenizer, takes_segments: bool) -> Corpus:
    """Read the data. `takes_segments` says whether the package keeps documents apart that share a row."""
    files = [] if options.data == BUILTIN else files_of(Path(options.data))
    lines = [file for file in files if file.suffix == SUFFIX]
    if lines and len(lines) < len(files):
        other = next(file for file in files if file.suffix != SUFFIX)
        raise DataError(
            f"--data {options.data} holds both {SUFFIX} files and others, such as {other}",
            hint="examples and text are learned in different ways: put them into directories of their own",
        )
    if lines:
        return _load_examples(lines, options, tokenizer, takes_segments)
    for item in fields(options):
        if item.name in FOR_EXAMPLES and getattr(options, item.name) != item.default:
            raise OptionError(
                f"{flag(item.name)} is for examples, and --data {options.data} is text",
                hint=f"give a {SUFFIX} file, or leave it out",
            )
    return load_text(options.data, tokenizer, options.seq_len)


def _load_examples(files: list[Path], options: Options, tokenizer: Tokenizer, takes_segments: bool) -> Corpus:
    packed = _packed(options.pack, takes_segments)
    template = load_template(options.chat_template, tokenizer.chat_template, tokenizer.special_tokens)
    end = _end_of_text(options.end_of_text, tokenizer)
    end_id = None if end is None else tokenizer.token_id(end)
    reading = Reading(tokenizer, template, end_id, options.seq_len, options.long)
    examples, census = read_examples(files, reading)
    if len(examples) < 2:
        left_out = f" ({', '.join(changes)})" if (changes := _changes(census)) else ""
        raise DataError(
            f"--data {options.data} holds {len(examples)} examples with something to learn{left_out}; "
            "training and validation need one each",
            hint="more examples; of each, a completion, or what the assistant says, must follow the first token",
        )
    # The same part whatever the seed, so that runs can be compared; not the last one, since files are often in order.
    order = shuffled(len(examples), philox.key_from(0, "validation"))
    cut = len(examples) - max(1, round(len(examples) * VALIDATION))
    parts = [PackedExamples(examples, np.sort(part), options.seq_len, packed) for part in (order[:cut], order[cut:])]
    source = "" if template is None else template.source
    return Corpus(
        train=parts[0],
        validation=parts[1],
        tokens_per_byte=examples.num_targets / max(1, int(census.byte_counts.sum())),
        unigram_entropy=unigram_entropy(census.byte_counts),
        identity={
            "--data (SHA-256)": census.fingerprint,
            "--chat-template (SHA-256)": hashlib.sha256(source.encode()).hexdigest(),
            "--end-of-text": end,
            "--long": options.long,
            "--pack": "yes" if packed else "no",
        },
        notes=(
            f"examples: {len(parts[0].chosen):,} to train on, {len(parts[1].chosen):,} to validate with; "
            f"{len(examples.tokens):,} tokens, {examples.num_targets:,} of them targets"
            + (
                "" if census.chats == census.lines else f"; texts end with {end!r}" if end else "; no token ends a text"
            ),
            _filling(parts[0], options, takes_segments),
            *([", ".join(_changes(census))] if _changes(census) else []),
            *([CLOCK] if template is not None and template.reads_clock else []),
        ),
    )


def _packed(pack: str, takes_segments: bool) -> bool:
    if pack == "yes" and not takes_segments:
        raise OptionError(
            "--pack yes: the package does not take segment_ids, so examples in one row would see each other",
            hint="compile it with --packed, or leave --pack out: each example then has a row to itself",
        )
    return takes_segments and pack != "no"


def _end_of_text(wanted: str, tokenizer: Tokenizer) -> str | None:
    """The token behind texts and completions."""
    token = {"auto": tokenizer.special_tokens.get("eos_token"), "none": None}.get(wanted, wanted)
    if token is not None and tokenizer.token_id(token) is None:
        whose = "eos_token of the tokenizer's configuration" if wanted == "auto" else "--end-of-text"
        raise OptionError(
            f"the {whose}, {token!r}, is no token of the tokenizer '{tokenizer.name}'",
            hint="--end-of-text TOKEN with one that is, or none",
        )
    return token


def _filling(train: PackedExamples, options: Options, takes_segments: bool) -> str:
    rows = train.rows(epoch_key(options.seed, 0))
    if train.pack:
        return f"an epoch has {len(rows):,} rows of {options.seq_len} positions, {rows.filled:.1%} of them filled"
    remedy = "" if takes_segments else "; a package compiled with --packed puts several into a row"
    return (
        f"each example has a row of {options.seq_len} positions to itself: "
        f"{1 - rows.filled:.1%} of the positions are padding{remedy}"
    )


def _changes(census: Census) -> list[str]:
    """What was not taken as it is."""
    counts = {
        "cut to --seq-len": census.cut,
        "left out as too long": census.dropped,
        "left out without a target": census.without_targets,
    }
    return [f"{count:,} example{'s' * (count > 1)} {what}" for what, count in counts.items() if count]
