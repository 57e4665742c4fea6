"""Several hosts on one machine: network namespaces on a bridge, each link shaped by tc. Needs root and iproute2."""

import os
import shutil
import subprocess
import tempfile
import time
from pathlib import Path

from unisono.bench.launch import BenchError, worker_environment


class EmulatedHosts:
    """Host i has the address 10.78.0.(i+1) on its interface "eth"; `rate` is tc's, e.g. "1gbit". Use in a `with`."""

    def __init__(self, hosts: int, rate: str):
        self.hosts, self.rate = hosts, rate
        self._tag = f"ub{os.getpid() % 10000}"

    def __enter__(self):
        if os.geteuid() != 0 or not all(map(shutil.which, ("ip", "tc"))):
            raise BenchError("emulated hosts need root and iproute2 (ip, tc)")
        try:
            self._ip("link", "add", self._tag, "type", "bridge")
            self._ip("link", "set", self._tag, "up")
            for host in range(self.hosts):
                self._add(host)
        except BaseException:
            self.__exit__()
            raise
        return self

    def _add(self, host: int) -> None:
        name, inside = f"{self._tag}h{host}", ("-n", f"{self._tag}h{host}")
        self._ip("netns", "add", name)
        self._ip("link", "add", f"{self._tag}v{host}", "type", "veth", "peer", "name", "eth", "netns", name)
        self._ip("link", "set", f"{self._tag}v{host}", "master", self._tag, "up")
        self._ip(*inside, "addr", "add", f"10.78.0.{host + 1}/24", "dev", "eth")
        for link in ("lo", "eth"):
            self._ip(*inside, "link", "set", link, "up")
        # A queue like a switch's port: behind a long one acknowledgements wait and TCP does not fill the link.
        self._call("tc", *inside, "qdisc", "add", "dev", "eth", "root", "tbf", "rate", self.rate, "burst", "256kb",
                   "latency", "2ms")

    def __exit__(self, *_):
        for host in range(self.hosts):
            self._call("ip", "netns", "del", f"{self._tag}h{host}", check=False)
        self._call("ip", "link", "del", self._tag, check=False)

    def _ip(self, *args: str) -> None:
        self._call("ip", *args)

    @staticmethod
    def _call(*command: str, check: bool = True) -> None:
        done = subprocess.run(command, capture_output=True, text=True)
        if check and done.returncode != 0:
            raise BenchError(f"{' '.join(command)}: {done.stderr.strip()}")

    def run(self, command: list[str], per_host: int = 1) -> None:
        """`command` on every host, `per_host` ranks each, to its end. *Throws* BenchError with the last words of a rank that failed."""
        with tempfile.TemporaryDirectory(prefix="unisono-bench-") as folder:
            self._run(command, per_host, folder)

    def link(self, host: int, up: bool) -> None:
        """Cuts or mends a host's link."""
        self._ip("-n", f"{self._tag}h{host}", "link", "set", "eth", "up" if up else "down")

    def start(self, command: list[str], per_host: int, store: str | None, folder) -> list[tuple[Path, subprocess.Popen]]:
        """Starts `command` on every host, `per_host` ranks each; what a rank prints goes to a file in `folder`. Without a `store`
        ranks meet at rank 0's address."""
        ranks = self.hosts * per_host
        running = []
        for rank in range(ranks):
            host = rank // per_host
            environment = {**worker_environment(), "RANK": str(rank), "WORLD_SIZE": str(ranks),
                           "LOCAL_RANK": str(rank % per_host), "LOCAL_WORLD_SIZE": str(per_host), "UNISONO_HOST_PART": str(host),
                           "MASTER_ADDR": "10.78.0.1", "MASTER_PORT": "29511", **({"UNISONO_STORE": store} if store else {}),
                           "GLOO_SOCKET_IFNAME": "eth"}
            output = Path(folder) / f"rank{rank}.txt"
            with output.open("w") as file:
                running.append((output, subprocess.Popen(
                    ["ip", "netns", "exec", f"{self._tag}h{host}", *command], stdin=subprocess.DEVNULL, stdout=file,
                    stderr=subprocess.STDOUT, env=environment)))
        return running

    def _run(self, command: list[str], per_host: int, folder: str) -> None:
        running = self.start(command, per_host, f"file:{folder}/store", folder)
        failed = None
        left = list(enumerate(running))
        while left:
            for one in list(left):
                rank, (output, process) = one
                if process.poll() is None:
                    continue
                left.remove(one)
                if process.returncode != 0 and failed is None:
                    failed = f"rank {rank} ended with {process.returncode}:\n  " + "\n  ".join(output.read_text().splitlines()[-15:])
                    for _, (_, other) in left:
                        other.kill()
            time.sleep(0.1)
        if failed:
            raise BenchError(failed)
