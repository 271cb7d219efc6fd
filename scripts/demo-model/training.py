"""A resumable training run: AdamW, averaged weights, learning rate, log and checkpoints.

Knows nothing of models or data: a script asks for the steps, computes a loss and hands it back.
"""

import os
import random
import time
from collections import defaultdict

import numpy as np
import torch

from common import BUILD

SAVE_EVERY_S = 240


def add_options(parser, tag, steps, batch, lr):
    """The options that every training script has."""
    parser.add_argument("--steps", type=int, default=steps, help="default: %(default)s")
    parser.add_argument("--batch", type=int, default=batch, help="default: %(default)s")
    parser.add_argument("--lr", type=float, default=lr, help="peak, default: %(default)s")
    parser.add_argument(
        "--cool",
        type=float,
        default=0.3,
        help="last steps, over which the learning rate goes down: a fraction below 1 or a number",
    )
    parser.add_argument(
        "--tag", default=tag, help="name of the checkpoints in $BUILD (default: %(default)s)"
    )


class Average:
    """An exponential moving average of parameters, with a warm-up of its decay."""

    def __init__(self, parameters, decay):
        self.parameters = parameters
        self.shadow = [p.detach().clone() for p in parameters]
        self.decay, self.n_updates = decay, 0

    @torch.no_grad()
    def update(self):
        self.n_updates += 1
        decay = min(self.decay, (1 + self.n_updates) / (10 + self.n_updates))
        torch._foreach_mul_(self.shadow, decay)
        torch._foreach_add_(self.shadow, [p.detach() for p in self.parameters], alpha=1 - decay)

    @torch.no_grad()
    def swap(self):
        """Exchanges the parameters with their averages; a second call puts them back."""
        for parameter, average in zip(self.parameters, self.shadow, strict=True):
            kept = parameter.detach().clone()
            parameter.copy_(average)
            average.copy_(kept)


def learning_rate(step, n_steps, peak, warm, cool, floor=0.02):
    """Warm-up, constant, then a straight line down over the last part."""
    n_cool = int(cool if cool >= 1 else cool * n_steps)
    if step < warm:
        return peak * (step + 1) / warm
    if step < n_steps - n_cool:
        return peak
    return peak * max(floor, (n_steps - step) / max(1, n_cool))


def save_atomically(value, path):
    partial = f"{path}.tmp"
    torch.save(value, partial)
    os.replace(partial, path)


class Run:
    """`for step in run.steps(): run.update(loss)`, with everything else around it.

    $BUILD/<tag>.pt gets what `export()` returns (called with the averaged weights in place) every
    four minutes and at the end; $BUILD/<tag>.state.pt what the run needs to go on after a stop.
    A number K written to $BUILD/<tag>.stop ends the run K steps later, cooling down over them.
    """

    def __init__(
        self,
        args,
        modules,
        export,
        groups=None,
        weight_decay=0.01,
        betas=(0.9, 0.98),
        average=0.997,
        warm=150,
        log_every=50,
        generator=None,
    ):
        self.args, self.modules, self.export = args, modules, export
        self.warm, self.log_every, self.generator = warm, log_every, generator
        self.parameters = [p for p in modules.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(
            groups or self.parameters, lr=args.lr, betas=betas, weight_decay=weight_decay
        )
        self.average = Average(self.parameters, average)
        self.step, self.history = 0, []
        self.recent = defaultdict(list)
        self.state_file = BUILD / f"{args.tag}.state.pt"
        if self.state_file.exists():
            self.resume()

    def resume(self):
        state = torch.load(self.state_file, weights_only=False)
        self.modules.load_state_dict(state["sd"])
        self.optimizer.load_state_dict(state["opt"])
        self.average.shadow, self.average.n_updates = state["ema"], state["n"]
        self.step, self.history = state["step"], state["hist"]
        random.setstate(state["rng"])
        torch.set_rng_state(state["trng"])
        if self.generator is not None:
            self.generator.set_state(state["generator"])
        print("resumed at step", self.step, flush=True)

    def save(self):
        self.average.swap()
        exported = dict(self.export(), step=self.step, batch=self.args.batch, hist=self.history)
        save_atomically(exported, BUILD / f"{self.args.tag}.pt")
        self.average.swap()
        state = dict(
            sd=self.modules.state_dict(),
            opt=self.optimizer.state_dict(),
            ema=self.average.shadow,
            n=self.average.n_updates,
            step=self.step,
            hist=self.history,
            rng=random.getstate(),
            trng=torch.get_rng_state(),
            generator=None if self.generator is None else self.generator.get_state(),
        )
        save_atomically(state, self.state_file)

    def stop_if_asked(self):
        stop_file = BUILD / f"{self.args.tag}.stop"
        if stop_file.exists():
            n_more = int(stop_file.read_text())
            stop_file.unlink()
            self.args.steps, self.args.cool = self.step + n_more, n_more
            print(f"stopping: same as --steps {self.args.steps} --cool {n_more}", flush=True)

    def log(self, lr, seconds, seconds_since_last):
        means = {name: float(np.mean(values)) for name, values in self.recent.items()}
        self.recent.clear()
        self.history.append((self.step, means["loss"]))
        print(
            f"step {self.step}",
            *(f"{name} {mean:.4f}" for name, mean in means.items()),
            f"lr {lr:.2e} {seconds:.0f} s {self.log_every / seconds_since_last:.2f} steps/s",
            flush=True,
        )

    def steps(self):
        """Yields the index of each step; the caller trains on one batch and calls `update`."""
        args = self.args
        started = last_log = last_save = time.time()
        self.modules.train()
        while True:
            self.stop_if_asked()
            if self.step >= args.steps:
                return
            lr = learning_rate(self.step, args.steps, args.lr, self.warm, args.cool)
            for group in self.optimizer.param_groups:
                group["lr"] = lr
            yield self.step
            self.step += 1
            now = time.time()
            if self.step % self.log_every == 0:
                self.log(lr, now - started, now - last_log)
                last_log = now
            if now - last_save > SAVE_EVERY_S or self.step == args.steps:
                self.save()
                last_save = now

    def update(self, loss, **metrics):
        """One optimiser step down the gradient of `loss`; `metrics` are only logged."""
        self.optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.parameters, 1.0)
        self.optimizer.step()
        self.average.update()
        for name, value in dict(metrics, loss=loss).items():
            self.recent[name].append(value.item())


class Shuffle:
    """Endless batches of indices below n; every index comes once before any comes again."""

    def __init__(self, n):
        self.n, self.order = n, []

    def take(self, count):
        while len(self.order) < count:
            self.order += random.sample(range(self.n), self.n)
        batch, self.order = self.order[:count], self.order[count:]
        return batch
