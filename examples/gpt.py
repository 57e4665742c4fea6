"""A small character-level GPT, trained data-parallel on the plays of Shakespeare: the twin of gpt.cc.

    unisono run -n 2 examples/gpt.py            1,500 steps, about two minutes on 2 cores
    unisono run -n 2 examples/gpt.py --quick    a few seconds
    python examples/gpt.py                      the same with one worker

Read from top to bottom: data, model, one step, training, the table. What data parallelism adds is marked (1) to (5).
It draws the same random numbers as gpt.cc and calls the same kernels, so on one machine both end with the same digest.
"""

import argparse
import math
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import torch
import torch.nn as nn
import torch.nn.functional as F
import unisono
from example_run import Progress, RunDirectory, count, gather_digests, minutes, print_table, run_main

LAYERS, WIDTH, HEADS, CONTEXT = 4, 128, 4, 64


def settings() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a run of a few seconds, for tests")
    parser.add_argument("--steps", type=int, help="optimizer steps (1500)")
    parser.add_argument("--batch", type=int, help="sequences per rank and step (12)")
    parser.add_argument("--seed", type=int, default=1, help="of the model's start and the batches")
    parser.add_argument("--threads", type=int, default=0, help="per rank; 0: what the launcher says")
    parser.add_argument("--lr", type=float, default=3e-3, help="highest learning rate")
    parser.add_argument("--bucket-cap-mb", type=float, help="gradient buckets in MiB")
    parser.add_argument("--name", default="gpt-py", help="of the run")
    parser.add_argument("--out", default="runs", help="where runs are written")
    parser.add_argument("--data", default="data/shakespeare.txt", help="the text, from tools/fetch_data.py")
    s = parser.parse_args()
    s.steps = (30 if s.quick else 1500) if s.steps is None else s.steps
    s.batch = (4 if s.quick else 12) if s.batch is None else s.batch
    if min(s.steps, s.batch) < 1:
        parser.error("--steps and --batch must be at least 1")
    return s


# ---------------------------------------------------------------------------------------------------------------- data

@dataclass
class Text:
    train: torch.Tensor  # the first 90%
    validation: torch.Tensor  # the last 10%, one byte per character
    vocabulary: int


def load_text(path: str) -> Text:
    if not Path(path).is_file():
        raise FileNotFoundError(f"cannot read {path}; fetch it with: python tools/fetch_data.py")
    raw = Path(path).read_bytes()
    characters = bytes(sorted(set(raw)))
    ids = torch.frombuffer(bytearray(raw.translate(bytes.maketrans(characters, bytes(range(len(characters)))))),
                           dtype=torch.uint8)
    cut = len(ids) * 9 // 10
    return Text(ids[:cut], ids[cut:], len(characters))


def sequences_at(text, offsets):
    """The sequences that begin at `offsets`; the target of each character is the next one."""
    windows = text[offsets.view(-1, 1) + torch.arange(CONTEXT + 1)].long()
    return windows[:, :-1].contiguous(), windows[:, 1:].contiguous()


def random_batch(text, batch, random):
    return sequences_at(text, torch.randint(0, len(text) - CONTEXT, (batch,), generator=random))


# --------------------------------------------------------------------------------------------------------------- model

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.ln1 = nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.proj = nn.Linear(WIDTH, WIDTH)
        self.ln2 = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        batch, length, _ = x.shape
        heads = self.qkv(self.ln1(x)).view(batch, length, 3, HEADS, WIDTH // HEADS).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(*heads.unbind(0), is_causal=True)
        x = x + self.proj(attended.transpose(1, 2).reshape(batch, length, WIDTH))
        return x + self.down(F.gelu(self.up(self.ln2(x)), approximate="tanh"))


class GPT(nn.Module):
    def __init__(self, vocabulary: int, seed: int):
        super().__init__()
        self.token = nn.Embedding(vocabulary, WIDTH)
        self.position = nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.ln = nn.LayerNorm(WIDTH)
        self.start_values(seed)

    @torch.no_grad()
    def start_values(self, seed: int):
        """GPT-2's: normal with deviation 0.02, less where a block writes into the residual stream."""
        torch.manual_seed(seed)
        for name, p in self.named_parameters():
            if p.dim() < 2:
                if name.endswith("bias"):
                    p.zero_()
                continue
            residual = name.endswith(("proj.weight", "down.weight"))
            p.normal_(0, 0.02 / math.sqrt(2 * LAYERS) if residual else 0.02)

    def forward(self, ids):
        x = self.ln(self.blocks(self.token(ids) + self.position.weight))
        return F.linear(x, self.token.weight)  # one matrix for reading and for writing characters


def loss_of(logits, targets):
    return F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1))


def make_optimizer(model):
    """Matrices decay, vectors (biases, LayerNorm) do not."""
    matrices = [p for p in model.parameters() if p.dim() >= 2]
    vectors = [p for p in model.parameters() if p.dim() < 2]
    return torch.optim.AdamW([{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}],
                             betas=(0.9, 0.99), fused=True)


def optimizer_step(optimizer, lr):
    for group in optimizer.param_groups:
        group["lr"] = lr
    optimizer.step()


def learning_rate(s, step):
    """Rises over the first steps, then falls along half a cosine to a tenth."""
    warmup = min(100, s.steps // 10 + 1)
    fall = 0.1 + 0.45 * (1 + math.cos(math.pi * step / s.steps))
    return s.lr * min(1.0, (step + 1.0) / warmup) * fall


@torch.no_grad()
def evaluate(model, text, sequences, group):
    """Mean loss over sequences spread evenly over `text`, shared out over ranks."""
    spread = torch.arange(group.rank(), sequences, group.size()) * (len(text) - CONTEXT - 1) // sequences
    total = torch.zeros(2, dtype=torch.float64)  # of losses, of sequences
    for offsets in spread.split(64):
        inputs, targets = sequences_at(text, offsets)
        total[0] += len(offsets) * loss_of(model(inputs), targets).item()
        total[1] += len(offsets)
    group.all_reduce(total).wait()  # (5) other numbers cross ranks through the group itself
    return (total[0] / total[1]).item()


# ----------------------------------------------------------------------------------------------------------- measuring

def measure(s, text, group):
    """Tokens/s of rank 0 with the others asleep, and of all ranks in data parallel: in turns, so that both see the
    same machine, and on a model of its own, so that training is not touched."""
    random = torch.Generator().manual_seed(group.rank())
    rounds, steps = (1, 3) if s.quick else (4, 20)

    def timed(model, optimizer, times):
        for i in range(steps):
            begin = time.perf_counter()
            inputs, targets = random_batch(text.train, s.batch, random)
            loss = loss_of(model(inputs), targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer_step(optimizer, 1e-4)
            if i > 0:
                times.append(time.perf_counter() - begin)

    plain, shared = GPT(text.vocabulary, s.seed), GPT(text.vocabulary, s.seed)
    ddp = unisono.DistributedDataParallel(shared, process_group=group)
    plain_optimizer, shared_optimizer = make_optimizer(plain), make_optimizer(shared)
    alone, together = [], []
    for _ in range(rounds):
        if group.rank() == 0:
            timed(plain, plain_optimizer, alone)
        group.barrier().wait()  # the others sleep here
        timed(ddp, shared_optimizer, together)
        group.barrier().wait()
    tokens = s.batch * CONTEXT
    return tokens / median(alone) if alone else math.nan, tokens * group.size() / median(together)


# ------------------------------------------------------------------------------------------------------------ training

def train() -> int:
    s = settings()
    if s.threads > 0:
        torch.set_num_threads(s.threads)
    threads = torch.get_num_threads()

    group = unisono.init()  # (1) who am I, who are the others
    rank, world = group.rank(), group.size()
    progress = Progress(rank == 0)
    run = RunDirectory(s.out, s.name, group)
    text = load_text(s.data)
    progress.say(f"{len(text.train) + len(text.validation):,} characters, {text.vocabulary} different; "
                 f"{count(world, 'rank')}, {count(threads, 'thread')} each, over {group.name}")
    tokens_alone, tokens_together = measure(s, text, group)

    model = GPT(text.vocabulary, s.seed)
    # (2) rank 0's values for all, hooks on every parameter
    ddp = unisono.DistributedDataParallel(model, process_group=group, bucket_cap_mb=s.bucket_cap_mb)
    optimizer = make_optimizer(model)
    random = torch.Generator().manual_seed(s.seed * 1000 + rank)  # (3) each rank draws its own batches
    run.write("start", steps=s.steps, ranks=world, batch=s.batch, seed=s.seed, threads=threads,
              parameters=sum(p.numel() for p in model.parameters()))

    evaluate_every, sequences = (10, 64) if s.quick else (250, 1024)
    trace_from = s.steps // 2
    trace_to = min(s.steps, trace_from + 5)
    tokens = s.batch * CONTEXT * world
    step_s, exposed_s = [], []
    begin = time.perf_counter()
    for step in range(s.steps):
        if step == trace_from:
            ddp.set_tracing(True)
        step_begin = time.perf_counter()
        inputs, targets = random_batch(text.train, s.batch, random)
        loss = loss_of(ddp(inputs), targets)
        optimizer.zero_grad()
        loss.backward()  # (4) gradients are averaged over ranks while this runs
        optimizer_step(optimizer, learning_rate(s, step))
        loss_here = loss.item()
        now = time.perf_counter()
        step_s.append(now - step_begin)
        exposed_s.append(ddp.stats.exposed_s)
        if step + 1 == trace_to:
            run.write_trace(ddp.take_trace())
            ddp.set_tracing(False)
        if not math.isfinite(loss_here):
            raise RuntimeError(f"the loss is not finite in step {step}")

        run.write("step", step=step, loss=loss_here, step_ms=step_s[-1] * 1e3, exposed_ms=exposed_s[-1] * 1e3,
                  tokens_per_s=tokens / step_s[-1], lr=learning_rate(s, step))
        progress.show(f"step {step + 1}/{s.steps} loss {loss_here:.3f}, {tokens / median(step_s[-20:]):,.0f} tokens/s, "
                      f"exposed {exposed_s[-1] * 1e3:.2f} ms ({100 * exposed_s[-1] / step_s[-1]:.1f}%), "
                      f"{minutes((now - begin) / (step + 1) * (s.steps - step - 1))} left")
        if (step + 1) % evaluate_every == 0 or step + 1 == s.steps:
            validation = evaluate(model, text.validation, sequences, group)
            progress.say(f"step {step + 1}: validation loss {validation:.4f}")
            run.write("validation", step=step, loss=validation)
    seconds = time.perf_counter() - begin

    identical = ddp.replicas_identical()
    digests = gather_digests(group, ddp.digest())
    exposed, whole = median(exposed_s) * 1e3, median(step_s) * 1e3
    efficiency = tokens_together / (world * tokens_alone)
    run.write("summary", validation_loss=validation, seconds=seconds, tokens_per_s_1_rank=tokens_alone,
              tokens_per_s_all_ranks=tokens_together, weak_scaling_efficiency=efficiency, exposed_ms=exposed,
              step_ms=whole, replicas_identical="yes" if identical else "no", digests=digests)
    if rank == 0:
        per_rank = f"  ({count(threads, 'thread')} per rank)"
        print_table([
            ("validation loss", f"{validation:.4f} after {s.steps} steps"),
            ("training time", f"{seconds:.1f} s"),
            ("tokens/s, 1 rank alone", f"{tokens_alone:,.0f}{per_rank}"),
            (f"tokens/s, {count(world, 'rank')}", f"{tokens_together:,.0f}{per_rank}"),
            ("weak-scaling efficiency", f"{100 * efficiency:.1f}%"),
            ("exposed communication", f"{exposed:.2f} ms of {whole:.1f} ms per step ({100 * exposed / whole:.1f}%), median"),
            ("replicas identical", "yes" if identical else "NO"),
            ("digest", digests[0]),
            ("written to", str(run.path)),
        ])
    return 0 if identical else 1


if __name__ == "__main__":
    run_main(train)
