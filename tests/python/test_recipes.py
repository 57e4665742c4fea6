"""docs/recipes.md: other packages on our backend. They are not among our requirements; where they are not installed these tests say so."""

import textwrap

import pytest

ACCELERATE = """
    import torch, torch.distributed as dist
    import unisono
    dist.init_process_group("unisono")
    import accelerate
    accelerator = accelerate.Accelerator(cpu=True)
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1, bias=False)
    torch.nn.init.ones_(model.weight)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
    assert accelerator.num_processes == 2, accelerator.state
    accelerator.backward(model(torch.full((1, 4), dist.get_rank() + 1.0)).sum())
    print("wrapper", type(model).__name__, "backend", dist.get_backend(), "gradient", next(model.parameters()).grad[0, 0].item())
    dist.destroy_process_group()
"""

LIGHTNING = """
    import torch, torch.distributed as dist
    import unisono
    import lightning
    from lightning.pytorch.strategies import DDPStrategy

    class Net(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(4, 1, bias=False)
            torch.nn.init.ones_(self.layer.weight)
        def training_step(self, batch, index):
            return self.layer(batch[0]).sum()
        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), 0.1)
        def on_before_optimizer_step(self, optimizer):
            print("backend", dist.get_backend(), "gradient", self.layer.weight.grad[0, 0].item())

    data = torch.utils.data.TensorDataset(torch.tensor([[1.0] * 4, [2.0] * 4]))
    trainer = lightning.Trainer(strategy=DDPStrategy(process_group_backend="unisono"), accelerator="cpu", devices=2, max_epochs=1,
                                logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)
    trainer.fit(Net(), torch.utils.data.DataLoader(data, batch_size=1))
"""


@pytest.mark.parametrize("package, script, said", [
    ("accelerate", ACCELERATE, "wrapper DistributedDataParallel backend unisono gradient 1.5"),
    ("lightning", LIGHTNING, "backend unisono gradient 1.5"),
])
def test_recipe(unisono_command, tmp_path, package, script, said):
    pytest.importorskip(package, reason=f"{package} is not installed: its recipe is not run")
    path = tmp_path / "recipe.py"
    path.write_text(textwrap.dedent(script))
    result = unisono_command("run", "-n", "2", path)
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stdout.count(said) == 2, result.stdout + result.stderr
