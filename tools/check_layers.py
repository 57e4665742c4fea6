#!/usr/bin/env python3
"""Checks who includes whom under src/ and include/, and names file:line of every violation.

1. A folder of src/ includes only itself and folders above it in LAYERS.
2. src/ includes its own headers as "comm/shm/x.h", relative to src/, and public ones as <unisono/x.h>.
3. Torch appears only outside the torch-free folders, public headers included through others counted.
4. Autograd internals, which change between torch releases, are included by one file.

Usage: tools/check_layers.py [ROOT]
"""

import pathlib
import re
import sys

# From the top; a folder may include what stands above it.
LAYERS = ["base", "comm", "stats", "reducer", "nn", "data", "verify", "checkpoint", "tune"]

# Inside comm: transports know nothing of each other; groups made of groups may use transports.
TRANSPORTS = ["serial", "fake", "shm", "mpi", "nccl", "c10d"]
# What makes an engine obey the contract, and an engine of two levels made of engines; the transports over engines use them.
ENGINES = ["issuer", "hierarchy"]
OVER_ENGINES = ["mpi", "nccl", "c10d"]
COMPOSITES = ["round_robin", "ordered", "torch_backend"]

# What every part of comm may use.
SHARED = ["comm", "comm/environment"]

# Files directly in comm/ that choose among transports, so that they include them.
FACTORIES = {"src/comm/make_group.cc", "src/comm/c10d/init.cc"}
# Compiled alone, once for each MPI.
STANDALONE = {"src/comm/mpi/shim/shim.cc"}

TORCH_FREE = ["base", "comm", "comm/serial", "comm/fake", "comm/shm", "comm/issuer", "comm/hierarchy", "comm/mpi",
              "comm/environment", "comm/round_robin", "comm/without_torch", "stats", "data", "tune"]

AUTOGRAD_INTERNALS = "torch/csrc/autograd/"
AUTOGRAD_FILES = {"src/reducer/autograd_hooks.cc"}
# What torch documents for users is not internal.
AUTOGRAD_PUBLIC = {"torch/csrc/autograd/custom_function.h"}

TORCH_ROOTS = ("torch", "ATen", "c10", "caffe2")
INCLUDE = re.compile(r'^\s*#\s*include\s*(?:"([^"]+)"|<([^>]+)>)')


class Checker:
    def __init__(self, root):
        self.root = root
        self.violations = []

    def includes(self, path):
        """(line, target, is_quoted) of every include of a file."""
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            found = INCLUDE.match(line)
            if found:
                yield number, found[1] or found[2], found[1] is not None

    def report(self, path, line, text):
        self.violations.append(f"{path.relative_to(self.root)}:{line}: {text}")

    def files(self, folder):
        base = self.root / folder
        return sorted(p for p in base.rglob("*") if p.suffix in (".h", ".cc")) if base.is_dir() else []

    def torch_behind(self, public):
        """The torch header that a public header brings in, through others or itself; None without one."""
        seen, todo = set(), [public]
        while todo:
            path = self.root / "include" / todo.pop()
            if path in seen or not path.is_file():
                continue
            seen.add(path)
            for _, target, _ in self.includes(path):
                if is_torch(target):
                    return target
                if target.startswith("unisono/"):
                    todo.append(target)
        return None

    def check_source(self, path):
        name = str(path.relative_to(self.root))
        folder = folder_of(path.relative_to(self.root / "src"))
        if folder.split("/")[0] not in LAYERS:
            self.report(path, 1, f"folder {folder} is not in LAYERS of tools/check_layers.py")
            return
        for line, target, quoted in self.includes(path):
            if quoted and name in STANDALONE:
                continue
            if quoted:
                self.check_own(path, name, folder, line, target)
            else:
                self.check_foreign(path, name, folder, line, target)

    def check_own(self, path, name, folder, line, target):
        if target.startswith("unisono/"):
            self.report(path, line, f'"{target}" is public: write <{target}>')
        elif not (self.root / "src" / target).is_file():
            self.report(path, line, f'"{target}" is not a file relative to src/')
        else:
            problem = layer_problem(name, folder, folder_of(pathlib.PurePath(target)))
            if problem:
                self.report(path, line, f'"{target}": {problem}')

    def check_foreign(self, path, name, folder, line, target):
        if target.startswith("unisono/") and not (self.root / "include" / target).is_file():
            self.report(path, line, f"<{target}> is not a public header")
        if (self.root / "src" / target).is_file():
            self.report(path, line, f'<{target}> is our own: write "{target}"')
        if folder in TORCH_FREE:
            torch = target if is_torch(target) else None
            if target.startswith("unisono/"):
                torch = self.torch_behind(target)
            if torch:
                self.report(path, line, f"<{target}> brings in torch ({torch}); src/{folder} is torch-free")
        self.check_autograd(path, name, line, target)

    def check_autograd(self, path, name, line, target):
        internal = target.startswith(AUTOGRAD_INTERNALS) and target not in AUTOGRAD_PUBLIC
        if internal and name not in AUTOGRAD_FILES:
            allowed = ", ".join(sorted(AUTOGRAD_FILES))
            self.report(path, line, f"<{target}> is an autograd internal; only {allowed} may use those")

    def check_public(self, path):
        name = str(path.relative_to(self.root))
        for line, target, quoted in self.includes(path):
            if quoted:
                self.report(path, line, f'public headers include with <>, and nothing of src/: "{target}"')
            elif target.startswith("unisono/") and not (self.root / "include" / target).is_file():
                self.report(path, line, f"<{target}> is not a public header")
            self.check_autograd(path, name, line, target)

    def run(self):
        sources, public = self.files("src"), self.files("include")
        if not sources:
            self.violations.append(f"{self.root}: no sources under src/")
        for path in sources:
            self.check_source(path)
        for path in public:
            self.check_public(path)
        return len(sources) + len(public)


def is_torch(target):
    return target.split("/")[0] in TORCH_ROOTS


def folder_of(relative):
    """The layer of a file, "reducer" or "comm/shm"; deeper folders belong to theirs."""
    parts = relative.parts[:-1]
    return "/".join(parts[: 2 if parts[:1] == ("comm",) else 1])


def layer_problem(name, folder, target):
    """Why `folder` may not include `target`; None when it may."""
    if folder == target:
        return None
    top, target_top = folder.split("/")[0], target.split("/")[0]
    if target_top not in LAYERS:
        return f"src/{target} is not in LAYERS"
    if top != target_top:
        if LAYERS.index(target_top) < LAYERS.index(top):
            return None
        return f"src/{target} is not above src/{folder}"
    if top != "comm" or target in SHARED:
        return None
    own, other = folder.removeprefix("comm").strip("/"), target.removeprefix("comm/")
    if name in FACTORIES:
        return None
    if other in ENGINES and own in OVER_ENGINES + COMPOSITES or (own, other) == ("hierarchy", "issuer"):
        return None
    if own in COMPOSITES and other in TRANSPORTS + COMPOSITES[: COMPOSITES.index(own)]:
        return None
    return f"src/{folder} may not know src/{target}"


def main():
    root = pathlib.Path(sys.argv[1] if len(sys.argv) > 1 else pathlib.Path(__file__).parent.parent).resolve()
    checker = Checker(root)
    count = checker.run()
    for violation in checker.violations:
        print(violation)
    if not checker.violations:
        print(f"layers: {count} files, no violation")
    return 1 if checker.violations else 0


if __name__ == "__main__":
    sys.exit(main())
