"""The command line's surface, frozen: a verb, argument or flag that comes or goes is a decision, made here too."""

from __future__ import annotations

from mgraph.cli.app import command

SURFACE = {
    "compile": "MODEL --for --mesh --dispatch --ep-chunks --expert-extent --expert-budget --router-loss-counts "
    "--pad-to-capacity/--no-pad-to-capacity --place "
    "--sequence-parallel/--no-sequence-parallel --pad "
    "--zero "
    "--keep-gathered/--no-keep-gathered --overlap/--no-overlap --wide-sums/--no-wide-sums --precision --grad-dtype "
    "--one-microbatch/--no-one-microbatch "
    "--target --arch --profile --provider --output/-o --recompute --activation-budget --memory-budget --batch "
    "--seq --offload --chunk-loss --optimizer --weight-decay "
    "--groups --lora --lora-train --beta1 --beta2 --eps --max-norm --check-finite --expert-bias-rate "
    "--expert-load/--no-expert-load "
    "--replayable-routing/--no-replayable-routing "
    "--loss-scale --loss-scale-growth --loss-scale-backoff --loss-scale-interval --loss-mask/--no-loss-mask "
    "--packed/--no-packed --max-length --block-size --graph-policy --graph-workload --graphs "
    "--batch-invariant/--no-batch-invariant --cuda-graphs --disable "
    "--verify/--no-verify --recipe/-c --force",
    "dump": "PKG PASS --fn --format",
    "diff": "PKG PASS_A PASS_B --format --limit",
    "explain": "PKG NODE|PATTERN --limit",
    "collectives": "PKG --format",
    "memory": "PKG --batch-size --seq-len --ranks --entry --limit --format",
    "kernels": "PKG --batch-size --seq-len --entry --rates --profile --steps --device --limit --format",
    "serve": "PKG",
    "tune": "PKG|MODEL --batch-size --seq-len --precision --profile --output/-o",
    "opt": "FILE --passes/-p --have --print-after --verify-each --time",
    "passes": "",
    "ops": "",
    "env": "",
    "version": "",
}


def test_surface() -> None:
    found = {}
    for name, verb in command().commands.items():
        words = []
        for item in verb.params:
            flags = [*item.opts, *item.secondary_opts]
            words.append("/".join(flags) if flags[0].startswith("-") else item.metavar.strip("[]"))
        found[name] = " ".join(words)
    assert found == SURFACE
