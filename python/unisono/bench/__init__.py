"""`unisono bench`: all-reduce and training steps against their rivals, in one interleaved run.

Whatever is compared is measured in turns, a short burst of each and round again, because a machine shared with others is
not the same from one minute to the next. What is reported is the median, the minimum and the count, and ratios.
"""

import argparse
import sys


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="unisono bench", description=__doc__.splitlines()[0])
    kinds = parser.add_subparsers(dest="kind", required=True)

    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--json", metavar="FILE", help="write all rows, as {\"rows\": [...]}")
    common.add_argument("--markdown", metavar="FILE", help="write the tables")
    common.add_argument("--quick", action="store_true", help="a few seconds, to see that everything runs")

    reduce = kinds.add_parser("all-reduce", parents=[common], help="all-reduces of one tensor")
    reduce.add_argument("--ranks", type=_numbers, default=[2, 4], metavar="N,N", help="2 or 4 (2,4)")
    reduce.add_argument("--sizes", type=_sizes, metavar="S,S", help="bytes of the tensor (4KiB,64KiB,1MiB,25MiB,100MB)")
    reduce.add_argument("--rounds", type=_positive, metavar="N", help="bursts of each rival at each size (15)")
    reduce.add_argument("--mpi", action="append", default=[], metavar="DIR",
                        help="also look for an MPI in DIR/bin; may be given several times")

    hosts = kinds.add_parser("hosts", parents=[common], help="all-reduces between emulated hosts (root, iproute2)")
    hosts.add_argument("--hosts", type=_positive, default=2, metavar="N", help="(2)")
    hosts.add_argument("--per-host", type=_positive, default=2, metavar="N", help="ranks on each (2)")
    hosts.add_argument("--rate", default="1gbit", metavar="R", help="of each host's link, as tc takes it (1gbit)")

    backend = kinds.add_parser("torch-backend", parents=[common], help="stock torch.distributed programs on the backend")
    backend.add_argument("--ranks", type=_worlds, default=[2], metavar="N,N", help="(2)")
    backend.add_argument("--rounds", type=_positive, metavar="N", help="bursts of each call (25)")

    robin = kinds.add_parser("round-robin", parents=[common], help="one Gloo group against several in turn")
    robin.add_argument("--ranks", type=_positive, default=2, metavar="N", help="(2)")
    robin.add_argument("--groups", type=_numbers, default=[1, 3, 5], metavar="K,K",
                       help="groups in turn; the first is what the others are compared with (1,3,5)")
    robin.add_argument("--model", default="mlp", choices=["mlp", "tiny", "gpt"], help="(mlp)")
    robin.add_argument("--rounds", type=_positive, metavar="N", help="calls and steps of each (40)")
    robin.add_argument("--rate", metavar="R",
                       help="each rank on an emulated host behind a link of this rate, as tc takes it (root, iproute2)")

    step = kinds.add_parser("step", parents=[common], help="training steps of whole models")
    step.add_argument("--ranks", type=_numbers, default=[2], metavar="N,N", help="(2)")
    step.add_argument("--models", type=_names, metavar="M,M", help="mlp,tiny,gpt,params1000 (all)")
    step.add_argument("--parts", type=_names, metavar="P,P",
                      help="step,memory,reducer,buckets,scaling,features,slow-link (the first three)")
    step.add_argument("--rate", default="1gbit", metavar="R", help="of the link of slow-link, as tc takes it (1gbit)")
    step.add_argument("--seconds", type=float, metavar="S", help="to spend on each way of training a model (8)")
    return parser


def _numbers(text: str) -> list[int]:
    return [_positive(part) for part in text.split(",")]


def _worlds(text: str) -> list[int]:
    sizes = _numbers(text)
    if min(sizes) < 2:
        raise argparse.ArgumentTypeError(f"{text}: at least 2 ranks, or nothing travels")
    return sizes


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text}: must be at least 1")
    return value


def _names(text: str) -> list[str]:
    return text.split(",")


def _sizes(text: str) -> list[int]:
    from unisono.bench.report import parse_bytes

    try:
        return [parse_bytes(part) for part in text.split(",")]
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def main(argv: list[str]) -> int:
    options = build_parser().parse_args(argv)
    from unisono.bench import all_reduce, between_hosts, round_robin, step, torch_backend
    from unisono.bench.launch import BenchError
    from unisono.bench.report import Report

    report = Report(f"unisono bench {' '.join(argv)}")
    try:
        {"all-reduce": all_reduce, "hosts": between_hosts, "round-robin": round_robin, "step": step,
         "torch-backend": torch_backend}[options.kind].run(options, report)
    except BenchError as error:
        print(f"unisono bench: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    report.finish(options.json, options.markdown)
    return 0
