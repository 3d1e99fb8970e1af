"""The independent computation for the error budget of steps with a window: plain torch in float32,
with the operations of a step in their order, rounded where a kernel stores.

A step adds the products with every record to those with the state in memory, and multiplies the
sums by the factors that normalise q and k. A step without a window rounds less often.
"""

import torch
from helpers import FP32
from narrow import keep_bits
from torch import Tensor
from window_cases import Case, rounded_states

from gdn_triton.recurrent.problem import turns


class NarrowWindow:
    """Sequences that are decoded with a window. states: [N, HV, K, V] in float32, as the pool keeps
    them. positions: the number of tokens of each sequence that its state includes.

    `keys` [N, HV, L, K], `u` [N, HV, L, V] and `g` [N, HV, L] are the records, and `tokens` [N, L]
    the positions of their tokens, -1 where a sequence has no record. The state of a head includes
    the tokens before `held` [N, HV].

    A kernel computes o from the state that it has read, and folds last. folds_first: a step folds
    before it computes o, from the rounded state, as the reference does."""

    def __init__(
        self, case: Case, states: Tensor, positions: list[int], *, folds_first: bool
    ) -> None:
        device = states.device
        self.case, self.states, self.folds_first = case, states, folds_first
        self.start = torch.tensor(positions, device=device)[:, None].repeat(1, case.HV)
        self.held = self.start.clone()
        self.turns = torch.tensor(turns(case.HV, case.period), device=device)
        self.keys = torch.zeros(case.N, case.HV, 0, case.K, device=device)
        self.u = torch.zeros(case.N, case.HV, 0, case.V, device=device)
        self.g = torch.zeros(case.N, case.HV, 0, device=device)
        self.tokens = torch.zeros(case.N, 0, dtype=torch.int64, device=device)

    def times(self, x: Tensor, u: Tensor) -> Tensor:
        """x @ u. Next to 16-bit tokens a GPU's products keep the bits of two tf32 numbers."""
        if x.device.type != "cpu" and self.case.dtype != FP32:
            x, u = keep_bits(x, 22), keep_bits(u, 22)
        return x @ u

    def of_heads(self, x: Tensor) -> Tensor:
        """[N, T, heads, ...] as [N, HV, T, ...] in float32."""
        return x.float().repeat_interleave(self.case.HV // x.shape[2], 2).transpose(1, 2)

    def logs_after(self, used: Tensor) -> tuple[Tensor, Tensor]:
        """The sums of the log decays of the `used` records [N, HV, L] that come after a record
        [N, HV, L], and of all of them [N, HV, 1]."""
        g = torch.where(used, self.g, 0.0)
        later = (self.tokens[:, None, :] > self.tokens[:, :, None])[:, None]
        return torch.where(later, g[:, :, None], 0.0).sum(-1), g.sum(-1, keepdim=True)

    def step(
        self, x: dict[str, Tensor], parents: Tensor, positions: list[int], called: list[bool]
    ) -> Tensor:
        """Returns o [N, T, HV, V] of the tokens x, which `accept` may add to the records. parents:
        [N, T]. called: which sequences the call has."""
        first = torch.tensor(positions, device=parents.device)[:, None]
        due = torch.maximum(first - (first - self.turns) % self.case.period, self.start)
        due = torch.where(torch.tensor(called, device=first.device)[:, None], due, self.held)
        if self.folds_first:
            self.fold_before(due)
        o = self.outputs(x, parents)
        if not self.folds_first:
            self.fold_before(due)
        return o

    def outputs(self, x: dict[str, Tensor], parents: Tensor) -> Tensor:
        q, k, v = (self.of_heads(x[name]) for name in ("q", "k", "v"))
        g, beta = (self.of_heads(x[name]) for name in ("g", "beta"))
        of_q, of_k = torch.full_like(q[..., 0], self.case.K**-0.5), torch.ones_like(k[..., 0])
        if self.case.l2norm:
            of_q *= torch.rsqrt(q.square().sum(-1) + 1e-6)
            of_k *= torch.rsqrt(k.square().sum(-1) + 1e-6)
        alive = self.tokens[:, None] >= self.held[..., None]
        after, total = self.logs_after(alive)
        held_u = torch.where(alive[..., None], self.u, 0.0)
        paths, index = paths_of(parents), torch.arange(parents.shape[1], device=g.device)
        u, out = torch.zeros_like(v), torch.zeros_like(v)
        for t in range(parents.shape[1]):
            path = paths[:, None, t]
            later = path[:, :, None] & (index > index[:, None])
            own_after = torch.where(later, g[:, :, None], 0.0).sum(-1)
            of_path = torch.where(path, g, 0.0).sum(-1, keepdim=True)
            w = torch.where(alive, (after + of_path).exp(), 0.0)
            own_w = torch.where(path & (index < t), own_after.exp(), 0.0)
            y = torch.stack([k[:, :, t], q[:, :, t]], 2)
            of_y = torch.stack([of_k[..., t], of_q[..., t]], 2)[..., None]
            both = (y @ self.states) * ((total + of_path).exp()[..., None] * of_y)
            both = both + self.times((y @ self.keys.mT) * (w[:, :, None] * of_y), held_u)
            both = both + self.times((y @ k.mT) * (own_w[:, :, None] * of_y), u)
            of_u = of_k[..., t, None] * beta[..., t, None]
            u[:, :, t] = (v[:, :, t] - both[:, :, 0]) * of_u
            qk = (q[:, :, t] * k[:, :, t]).sum(-1, keepdim=True) * of_q[..., t, None]
            out[:, :, t] = both[:, :, 1] + qk * u[:, :, t]
        self.given = k, u, g
        return out.transpose(1, 2)

    def accept(self, paths: list[list[int]], positions: list[int]) -> None:
        """Appends the records of the tokens `paths` of the last step, which had these positions."""
        device = self.tokens.device
        first = torch.tensor(positions, device=device)[:, None]
        for i in range(max(map(len, paths))):
            has = [i < len(path) for path in paths]
            at = torch.tensor([path[i] if i < len(path) else 0 for path in paths], device=device)
            every = torch.arange(len(paths), device=device)
            k, u, g = (y[every, :, at].unsqueeze(2) for y in self.given)
            self.keys, self.u = torch.cat([self.keys, k], 2), torch.cat([self.u, u], 2)
            self.g = torch.cat([self.g, g], 2)
            token = torch.where(torch.tensor(has, device=device)[:, None], first + i, -1)
            self.tokens = torch.cat([self.tokens, token], 1)

    def fold(self, chosen: list[int], positions: list[int]) -> None:
        """Folds all records of these sequences."""
        due = self.held.clone()
        for n in chosen:
            due[n] = self.start[n] = positions[n]
        self.fold_before(due)

    def fold_before(self, due: Tensor) -> None:
        """Folds the records of the tokens before `due` [N, HV], and drops records that no head
        needs."""
        tokens = self.tokens[:, None]
        used = (tokens >= self.held[..., None]) & (tokens < due[..., None])
        after, total = self.logs_after(used)
        u = torch.where(used[..., None], self.u * after.exp()[..., None], 0.0)
        folded = total.exp()[..., None] * self.states + self.times(self.keys.mT, u)
        folded = rounded_states(folded, self.case.pool)
        self.states = torch.where((due > self.held)[..., None, None], folded, self.states)
        self.held = torch.maximum(self.held, due)
        kept = (self.tokens >= self.held.amin(1, keepdim=True)).any(0)
        self.keys, self.u = self.keys[:, :, kept], self.u[:, :, kept]
        self.g, self.tokens = self.g[:, :, kept], self.tokens[:, kept]


def paths_of(parents: Tensor) -> Tensor:
    """[N, T, T]: whether a token is on the path to a token, which includes that token itself.
    parents: [N, T]."""
    N, T = parents.shape
    paths = torch.eye(T, dtype=torch.bool, device=parents.device).repeat(N, 1, 1)
    every = torch.arange(N, device=parents.device)
    for t in range(1, T):
        parent = parents[:, t]
        above = paths[every, parent.clamp(min=0)] & (parent >= 0)[:, None]
        paths[:, t] |= above
    return paths
