"""The command `unisono`."""

import argparse
import sys


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="unisono", description="Data-parallel training: replicas that play the same notes.")
    commands = parser.add_subparsers(dest="command", required=True)

    run = commands.add_parser("run", help="run N workers of a program on this machine",
                              usage="unisono run -n N [--timeout S] [--no-bind] [-m] PROGRAM|SCRIPT.py [ARGS ...]")
    run.add_argument("-n", "--ranks", type=int, required=True, metavar="N", help="how many workers")
    run.add_argument("--timeout", type=float, metavar="S", help="end everything after S seconds, with exit code 124")
    run.add_argument("--no-bind", action="store_true", help="let workers run on any core")
    run.add_argument("-m", "--module", action="store_true", help="PROGRAM is a Python module")
    run.add_argument("program", nargs=argparse.REMAINDER, metavar="PROGRAM")

    commands.add_parser("info", help="what this installation and this machine offer")

    bench = commands.add_parser("bench", help="measure: all-reduce, step", add_help=False)
    bench.add_argument("args", nargs=argparse.REMAINDER)

    trace = commands.add_parser("trace", help="work with timelines").add_subparsers(dest="trace_command", required=True)
    merge = trace.add_parser("merge", help="several ranks' timelines as one that Perfetto opens")
    merge.add_argument("out", metavar="OUT")
    merge.add_argument("inputs", nargs="+", metavar="IN")
    return parser


def main(argv: list[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    if argv[:1] == ["bench"]:  # its options are its own
        from unisono.bench import main as bench_main

        return bench_main(argv[1:]) or 0
    options = build_parser().parse_args(argv)
    try:
        return {"run": _run, "info": _info, "trace": _trace}[options.command](options)
    except (OSError, ValueError) as error:
        return _fail(options.command, error, 1)


def _fail(command: str, error: Exception | str, code: int) -> int:
    print(f"unisono {command}: {error}", file=sys.stderr)
    return code


def _run(options) -> int:
    from unisono import launch

    command = options.program[1:] if options.program[:1] == ["--"] else options.program
    if not command:
        return _fail("run", "the PROGRAM is missing; see unisono run --help", 2)
    if options.timeout is not None and not options.timeout > 0:
        return _fail("run", f"--timeout {options.timeout:g}: must be above 0 seconds", 2)
    try:
        return launch.run(launch.LaunchOptions(
            ranks=options.ranks, command=command, module=options.module,
            timeout_s=options.timeout, bind=not options.no_bind))
    except launch.LaunchError as error:
        return _fail("run", error, error.exit_code)


def _info(options) -> int:
    from unisono.info import describe

    print(describe())
    return 0


def _trace(options) -> int:
    from unisono.trace import merge

    print(f"{options.out}: {merge(options.out, options.inputs)} events of {len(options.inputs)} files")
    return 0
