"""A small convolutional net on 4,000 real handwritten digits, held to account on another 1,000: the twin of mnist.cc.

    unisono run -n 2 examples/mnist.py            a few seconds on 2 cores

Shows how to share out a data set exactly: every digit is seen once an epoch whatever the number of ranks, none twice,
none left out, and the gradient is the mean over the samples, not over the ranks (the last batch is uneven).
"""

import argparse
import math
import time
from pathlib import Path
from statistics import median

import torch
import torch.nn as nn
import torch.nn.functional as F
import unisono
from example_run import Progress, RunDirectory, count, gather_digests, print_table, run_main

DIGITS, TRAIN, PIXELS = 5000, 4000, 28 * 28


def settings() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="one epoch, for tests")
    parser.add_argument("--epochs", type=int, help="passes over the 4,000 digits (8)")
    parser.add_argument("--batch", type=int, default=32, help="digits per rank and step")
    parser.add_argument("--seed", type=int, default=1, help="of the model's start and the order of the digits")
    parser.add_argument("--threads", type=int, default=0, help="per rank; 0: what the launcher says")
    parser.add_argument("--lr", type=float, default=2e-3, help="highest learning rate")
    parser.add_argument("--bucket-cap-mb", type=float, help="gradient buckets in MiB")
    parser.add_argument("--name", default="mnist-py", help="of the run")
    parser.add_argument("--out", default="runs", help="where runs are written")
    parser.add_argument("--data", default="data/mnist.bin", help="the digits, from tools/fetch_data.py")
    s = parser.parse_args()
    s.epochs = (1 if s.quick else 8) if s.epochs is None else s.epochs
    if min(s.epochs, s.batch) < 1:
        parser.error("--epochs and --batch must be at least 1")
    return s


def load_digits(path: str):
    """(train, test), each (pixels, labels)."""
    raw = Path(path).read_bytes() if Path(path).is_file() else b""
    if len(raw) != DIGITS * (PIXELS + 1):
        raise FileNotFoundError(f"{path} is missing or not whole; fetch it with: python tools/fetch_data.py")
    data = torch.frombuffer(bytearray(raw), dtype=torch.uint8)
    x = data[:DIGITS * PIXELS].view(DIGITS, 1, 28, 28).float() / 255 - 0.13
    y = data[DIGITS * PIXELS:].long()
    order = torch.randperm(DIGITS, generator=torch.Generator().manual_seed(2026))  # the file is sorted by label
    train, test = order[:TRAIN], order[TRAIN:]
    return (x[train], y[train]), (x[test], y[test])


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 16, 3)
        self.conv2 = nn.Conv2d(16, 32, 3)
        self.fc1 = nn.Linear(32 * 5 * 5, 128)
        self.fc2 = nn.Linear(128, 10)

    def forward(self, x):
        x = F.max_pool2d(F.relu(self.conv1(x)), 2)
        x = F.max_pool2d(F.relu(self.conv2(x)), 2)
        return self.fc2(F.relu(self.fc1(x.flatten(1))))


def share(items, rank, world):
    """This rank's part of `items`: neighbouring pieces, as even as can be."""
    return items[len(items) * rank // world:len(items) * (rank + 1) // world]


@torch.no_grad()
def accuracy(net, test, group):
    x, y = (share(part, group.rank(), group.size()) for part in test)
    total = torch.tensor([(net(x).argmax(1) == y).sum(), len(y)], dtype=torch.float64)
    group.all_reduce(total).wait()
    return (total[0] / total[1]).item()


def train() -> int:
    s = settings()
    if s.threads > 0:
        torch.set_num_threads(s.threads)
    group = unisono.init()
    rank, world = group.rank(), group.size()
    progress = Progress(rank == 0)
    run = RunDirectory(s.out, s.name, group)
    (train_x, train_y), test = load_digits(s.data)

    torch.manual_seed(s.seed)
    net = Net()
    ddp = unisono.DistributedDataParallel(net, process_group=group, bucket_cap_mb=s.bucket_cap_mb)
    decays = [{"params": [p for p in net.parameters() if p.dim() >= 2], "weight_decay": 0.01},
              {"params": [p for p in net.parameters() if p.dim() < 2], "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(decays, fused=True)
    run.write("start", epochs=s.epochs, ranks=world, batch=s.batch, seed=s.seed, threads=torch.get_num_threads())

    whole_batch = s.batch * world
    steps = s.epochs * -(-TRAIN // whole_batch)
    trace_from, trace_to = 3, min(8, steps)
    seen = torch.zeros(TRAIN, dtype=torch.int32)  # how often this rank saw each digit
    step_s, exposed_s = [], []
    step = 0
    begin = time.perf_counter()
    for epoch in range(s.epochs):
        order = torch.randperm(TRAIN, generator=torch.Generator().manual_seed(s.seed * 1000 + epoch))  # same everywhere
        for together in order.split(whole_batch):
            if step == trace_from:
                ddp.set_tracing(True)
            step_begin = time.perf_counter()
            mine = share(together, rank, world)  # may be empty in the last batch
            loss = F.cross_entropy(ddp(train_x[mine]), train_y[mine], reduction="sum") / max(len(mine), 1)
            optimizer.zero_grad()
            ddp.weight(loss, len(mine)).backward()  # gradients of the mean over all samples of all ranks
            for parameters in optimizer.param_groups:
                parameters["lr"] = s.lr * (0.05 + 0.475 * (1 + math.cos(math.pi * step / steps)))
            optimizer.step()
            seen[mine] += 1
            step_s.append(time.perf_counter() - step_begin)
            exposed_s.append(ddp.stats.exposed_s)
            step += 1
            if step == trace_to:
                run.write_trace(ddp.take_trace())
                ddp.set_tracing(False)
            run.write("step", step=step - 1, loss=loss.item(), step_ms=step_s[-1] * 1e3, exposed_ms=exposed_s[-1] * 1e3)
            progress.show(f"epoch {epoch + 1}/{s.epochs}, step {step}/{steps}, loss {loss.item():.3f}, "
                          f"exposed {exposed_s[-1] * 1e3:.2f} ms ({100 * exposed_s[-1] / step_s[-1]:.1f}%)")
        held_out = accuracy(net, test, group)
        progress.say(f"epoch {epoch + 1}: held-out accuracy {100 * held_out:.2f}%")
        run.write("validation", step=step - 1, accuracy=held_out)
    seconds = time.perf_counter() - begin

    group.all_reduce(seen).wait()
    exact = bool((seen == s.epochs).all())
    identical = ddp.replicas_identical()
    digests = gather_digests(group, ddp.digest())
    exposed, whole = median(exposed_s) * 1e3, median(step_s) * 1e3
    run.write("summary", accuracy=held_out, seconds=seconds, exact_coverage="yes" if exact else "no",
              exposed_ms=exposed, step_ms=whole, replicas_identical="yes" if identical else "no", digests=digests)
    if rank == 0:
        print_table([
            ("held-out accuracy", f"{100 * held_out:.2f}% of 1,000 digits after {count(s.epochs, 'epoch')}"),
            ("training time", f"{seconds:.1f} s, {count(world, 'rank')}"),
            ("each digit once an epoch", "yes" if exact else "NO"),
            ("exposed communication", f"{exposed:.2f} ms of {whole:.1f} ms per step ({100 * exposed / whole:.1f}%), median"),
            ("replicas identical", "yes" if identical else "NO"),
            ("digest", digests[0]),
            ("written to", str(run.path)),
        ])
    return 0 if identical and exact else 1


if __name__ == "__main__":
    run_main(train)
