"""A Slurm of the tests' own: a controller and two nodes, n0 and n1, on this machine, each with a host name, a network
and processes of its own.

All of it lives in one pid namespace, whose first process reads from a pipe: when the pipe is closed, also by the death
of whoever holds it, the kernel ends every daemon, step and task, and with them go their networks and mounts. Outside
there is nothing to be seen, no port is taken, and nothing is left but the files in `folder`.
"""

import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

PROGRAMS = ("slurmctld", "slurmd", "srun", "munged", "mungekey", "unshare", "nsenter", "ip")
START_LIMIT_S = 20
END_LIMIT_S = 10
POLL_S = 0.1

# Nothing is written outside `folder`: the daemons' own files lie in a /run that only they see, where sockets have short
# paths.
CONFIGURATION = """\
ClusterName=private
SlurmctldHost=login(10.79.0.254)
SlurmUser=root
StateSaveLocation=/run/state
SlurmdSpoolDir=/run/spool.%n
TmpFS=/run/tmp.%n
SlurmctldPidFile=/run/slurmctld.pid
SlurmdPidFile=/run/slurmd.%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.%n.log
PlugStackConfig=/run/plugstack.conf
MailProg=/bin/true
AuthType=auth/munge
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
MpiDefault=none
ReturnToService=2
KillWait=1
SchedulerParameters=batch_sched_delay=0
SlurmdParameters=config_overrides
NodeName=n[0-1] NodeAddr=10.79.0.[1-2] CPUs=16 State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES MaxTime=5 State=UP
"""

HOSTS = "127.0.0.1 localhost\n10.79.0.254 login\n10.79.0.1 n0\n10.79.0.2 n1\n"

# The first process of the world, on the host "login".
WORLD = """\
set -e
hostname login
mount --bind hosts /etc/hosts
mount --bind nsswitch.conf /etc/nsswitch.conf
mount -t tmpfs tmpfs /run
mkdir -p /run/munge /run/state /run/spool.n0 /run/spool.n1 /run/tmp.n0 /run/tmp.n1
touch /run/plugstack.conf
mungekey --create --keyfile /run/munge/key
munged --foreground --key-file=/run/munge/key --pid-file=/run/munge/pid --seed-file=/run/munge/seed \\
  --log-file=/run/munge/log >munged.txt 2>&1 &
ip link set lo up
ip link add name switch type bridge
ip addr add 10.79.0.254/24 dev switch
ip link set switch up
slurmctld -D >slurmctld.txt 2>&1 &
for node in 0 1; do
  ip netns add n$node
  ip link add port$node type veth peer name eth netns n$node
  ip link set port$node master switch up
  ip -n n$node addr add 10.79.0.$((node + 1))/24 dev eth
  ip -n n$node link set lo up
  ip -n n$node link set eth up
  nsenter --net=/run/netns/n$node unshare --uts --ipc --mount --pid --fork --mount-proc \\
    sh node.sh n$node >n$node.txt 2>&1 &
done
read -r _ || exit 0
"""

# The first process of a node. /sys tells a network's interfaces, so the node has its own, with the machine's cgroups.
NODE = """\
set -e
hostname $1
mkdir -p /run/cgroup.$1
mount --rbind /sys/fs/cgroup /run/cgroup.$1
mount -t sysfs sysfs /sys
mount --rbind /run/cgroup.$1 /sys/fs/cgroup
slurmd -D -N $1 &
wait
"""


def why_not() -> str:
    """Why there can be none here; empty when there can."""
    missing = [program for program in PROGRAMS if shutil.which(program, path=_path()) is None]
    if missing:
        return f"no {', '.join(missing)} (Debian: apt-get install slurmctld slurmd slurm-client munge iproute2)"
    if os.geteuid() != 0:
        return "Slurm's daemons need root here"
    tried = subprocess.run(["unshare", *_SPACES, "true"], capture_output=True, text=True, check=False)
    return f"namespaces are not allowed here: {tried.stderr.strip()}" if tried.returncode else ""


_SPACES = ("--net", "--uts", "--ipc", "--mount", "--pid", "--fork", "--mount-proc", "--kill-child")


def _path() -> str:
    return os.environ.get("PATH", "") + ":/usr/sbin:/sbin"


class PrivateSlurm:
    """Use in a `with`. `folder` takes its configuration, its logs and what jobs leave."""

    def __init__(self, folder: Path):
        self.folder = folder
        self._environment = {name: value for name, value in os.environ.items()
                             if not re.match("RANK$|WORLD_SIZE$|MASTER_|SLURM_|PMI|OMPI_", name)}
        self._environment |= {"PATH": f"{Path(sys.executable).parent}:{_path()}", "SLURM_CONF": f"{folder}/slurm.conf",
                              "OMP_NUM_THREADS": "1"}

    def __enter__(self):
        files = {"slurm.conf": CONFIGURATION.format(folder=self.folder), "hosts": HOSTS,
                 "nsswitch.conf": "hosts: files\n", "world.sh": WORLD, "node.sh": NODE}
        for name, text in files.items():
            (self.folder / name).write_text(text)
        with (self.folder / "world.txt").open("w") as said:
            self._world = subprocess.Popen(["unshare", *_SPACES, "sh", "world.sh"], stdin=subprocess.PIPE, stdout=said,
                                           stderr=subprocess.STDOUT, cwd=self.folder, env=self._environment)
        try:
            self._wait_until_idle()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_):
        self._world.stdin.close()
        try:
            self._world.wait(END_LIMIT_S)
        except subprocess.TimeoutExpired:
            self._world.kill()
            self._world.wait()
            raise

    def _wait_until_idle(self):
        end = time.monotonic() + START_LIMIT_S
        while self._states() != ["idle", "idle"]:
            if self._world.poll() is not None or time.monotonic() > end:
                raise AssertionError(f"Slurm did not come up within {START_LIMIT_S} s:\n{self.logs()}")
            time.sleep(POLL_S)

    def _states(self):
        try:
            inside = os.readlink(f"/proc/{self._world.pid}/ns/pid_for_children")
        except FileNotFoundError:
            return []  # it is made, and its first process is not there yet
        return [] if inside == os.readlink("/proc/self/ns/pid") else self._sinfo()

    def _sinfo(self):
        return self.run("sinfo", "-h", "-N", "-o", "%T", limit_s=5)[1].split()

    def logs(self) -> str:
        """The last words of everything that speaks."""
        files = sorted([*self.folder.glob("*.log"), *self.folder.glob("*.txt")])
        return "\n".join(f"--- {file.name}\n{file.read_text(errors='replace')[-1500:]}" for file in files)

    def run(self, *command, limit_s: float) -> tuple[int, str]:
        """A command on the login host, to its end: exit code (124 at the limit) and all it said."""
        world = self._world.pid
        enter = ["nsenter", f"--target={world}", "--net", "--uts", "--ipc", "--mount",
                 f"--pid=/proc/{world}/ns/pid_for_children", f"--wd={self.folder}",
                 "timeout", "--kill-after=2", str(limit_s)]
        done = subprocess.run([*enter, *map(str, command)], env=self._environment, text=True, errors="replace",
                              stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False)
        return done.returncode, done.stdout

    def batch(self, *command, limit_s: float) -> tuple[str, str]:
        """`sbatch COMMAND` to the job's end: its state and all it said. `sbatch --wait` looks only now and then."""
        output = self.folder / f"job{len(list(self.folder.glob('job*.out')))}.out"
        code, text = self.run("sbatch", "--parsable", f"--output={output}", *command, limit_s=limit_s)
        assert code == 0, text
        job, end, state = text.split()[-1], time.monotonic() + limit_s, "PENDING"
        while state in ("PENDING", "CONFIGURING", "RUNNING", "COMPLETING"):
            if time.monotonic() > end:
                self.run("scancel", "--signal=KILL", "--full", job, limit_s=5)
                return f"{state} after {limit_s} s", output.read_text(errors="replace") if output.exists() else ""
            time.sleep(POLL_S)
            state = re.search(r"JobState=(\w+)", self.run("scontrol", "show", "job", job, limit_s=5)[1])[1]
        return state, output.read_text(errors="replace")
