"""The recurrence in plain PyTorch, step by step: what every other backend is compared with.

Any device and element type. 16-bit inputs are computed in fp32; the hidden state is rounded to the inputs'
type between steps, as it is in the output. :func:`forward` is made of differentiable operations only, so that
autograd can differentiate it as often as wanted; :func:`backward` is the same gradient written out.

The formulas are those of ``torch.nn.LSTM``, ``GRU`` (the reset gate applies after the product) and ``RNN``.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tilefit.rnn.cells import Backward, Cell, Forward, Grads, Rows
from tilefit.rnn.states import active_steps, previous


def forward(
    cell: Cell, xg: Tensor, w_hh: Tensor, bias_n: Tensor | None, rows: Rows, *, save: bool
) -> Forward:
    """Run a layer over its sequence.

    Args:
        cell: Which recurrence.
        xg: Input projection with its biases, [T, B, D, G * H]; for a GRU without the n part of ``b_hh``.
        w_hh: Recurrent weights, [D, G * H, H].
        bias_n: The n part of a GRU's ``b_hh``, [D, H]; None without bias, and for other cells.
        rows: What they start from, which is given, and where they end.
        save: Also return what :func:`backward` needs.
    """
    steps, _, directions, _ = xg.shape
    wide = torch.promote_types(xg.dtype, torch.float32)
    h0, c0, lengths, reset = rows
    assert h0 is not None
    active = active_steps(lengths, steps)
    restart = _restarts(reset, active)
    outs, gates, cs, c_n = [], [], [], []
    for direction in range(directions):
        order = range(steps) if direction == 0 else range(steps - 1, -1, -1)
        weight = w_hh[direction].to(wide).t()
        bias = bias_n[direction].to(wide) if bias_n is not None else None
        h = h0[direction]
        c = c0[direction].to(wide) if c0 is not None else None
        found: dict[int, tuple[Tensor, Tensor, Tensor | None]] = {}
        for t in order:
            if restart is not None:
                h = h.masked_fill(restart[t], 0)
                c = c.masked_fill(restart[t], 0) if c is not None else None
            h_new, c_new, kept = _step(cell, xg[t, :, direction].to(wide), h.to(wide), c, weight, bias)
            h_new = h_new.to(xg.dtype)
            if active is None:
                h, c, out = h_new, c_new, h_new
            else:
                on = active[t].unsqueeze(-1)
                h, out = torch.where(on, h_new, h), h_new.masked_fill(~on, 0)
                c = torch.where(on, c_new, c) if c is not None and c_new is not None else None
            found[t] = (out, kept, c)
        in_order = [found[t] for t in range(steps)]
        outs.append(torch.stack([row[0] for row in in_order]))
        if save and cell.saved:
            gates.append(torch.stack([row[1] for row in in_order]))
        if c is not None:
            c_n.append(c)
        if save and cell.has_c:
            cs.append(torch.stack([row[2] for row in in_order if row[2] is not None]))
    empty = xg.new_empty(0)
    return Forward(
        out=torch.stack(outs, 2),
        c_n=torch.stack(c_n).to(xg.dtype) if c_n else empty,
        gates=torch.stack(gates, 2).to(xg.dtype) if gates else empty,
        c=torch.stack(cs, 2) if cs else xg.new_empty(0, dtype=wide),
    )


def _restarts(reset: Tensor | None, active: Tensor | None) -> Tensor | None:
    """Where the state is zeroed before a step, bool[T, B, 1]: not beyond a row's length."""
    if reset is None:
        return None
    restart = reset != 0
    return (restart if active is None else restart & active).unsqueeze(-1)


def _step(
    cell: Cell, x: Tensor, h: Tensor, c: Tensor | None, weight: Tensor, bias_n: Tensor | None
) -> tuple[Tensor, Tensor | None, Tensor]:
    """One step: hidden state, cell state, and what it saves."""
    product = h @ weight
    if cell.has_c:
        assert c is not None
        i, f, g, o = (x + product).chunk(4, -1)
        i, f, g, o = i.sigmoid(), f.sigmoid(), g.tanh(), o.sigmoid()
        c = f * c + i * g
        return o * c.tanh(), c, torch.cat([i, f, g, o], -1)
    if cell.is_gru:
        hidden = h.shape[-1]
        r, z = (x + product)[:, : 2 * hidden].sigmoid().chunk(2, -1)
        hn = product[:, 2 * hidden :] if bias_n is None else product[:, 2 * hidden :] + bias_n
        n = (x[:, 2 * hidden :] + r * hn).tanh()
        return n + z * (h - n), None, torch.cat([r, z, n, hn], -1)
    pre = x + product
    return (pre.tanh() if cell.name == "rnn_tanh" else pre.relu()), None, pre


def backward(
    cell: Cell, grads: Grads, results: tuple[Tensor, Tensor, Tensor], w_hh: Tensor, rows: Rows
) -> Backward:
    """Gradient of the pre-activations and of the initial state.

    Args:
        cell: Which recurrence.
        grads: Of the output and the final states, all given.
        results: ``out``, ``gates`` and ``c`` of :func:`forward`.
        w_hh, rows: As in :func:`forward`.
    """
    out, gates, c = results
    grad_out, grad_hn, grad_cn = grads
    h0, c0, lengths, reset = rows
    assert grad_out is not None
    assert grad_hn is not None
    steps, _, directions, _ = out.shape
    wide = torch.promote_types(out.dtype, torch.float32)
    active = active_steps(lengths, steps)
    restart = _restarts(reset, active)
    h_before = previous(out, h0, lengths, reset).to(wide)
    c_before = previous(c, c0.to(wide), lengths, reset) if c0 is not None else None
    all_dg, grad_h0, grad_c0 = [], [], []
    for direction in range(directions):
        order = range(steps - 1, -1, -1) if direction == 0 else range(steps)
        weight = _hidden_weight(cell, w_hh[direction].to(wide))
        dh = grad_hn[direction].to(wide)
        dc = grad_cn[direction].to(wide) if grad_cn is not None else None
        found: dict[int, Tensor] = {}
        for t in order:
            dh_out = grad_out[t, :, direction].to(wide) + dh
            kept = gates[t, :, direction].to(wide) if cell.saved else out[t, :, direction].to(wide)
            dg, dh_direct, dc_new = _step_backward(
                cell,
                dh_out,
                dc,
                kept,
                h_before[t, :, direction],
                c[t, :, direction] if cell.has_c else None,
                c_before[t, :, direction] if c_before is not None else None,
            )
            dh_new = dg[:, : weight.shape[0]] @ weight
            if dh_direct is not None:
                dh_new = dh_new + dh_direct
            if restart is not None:
                dh_new = dh_new.masked_fill(restart[t], 0)
                dc_new = dc_new.masked_fill(restart[t], 0) if dc_new is not None else None
            if active is not None:
                on = active[t].unsqueeze(-1)
                dg, dh_new = dg.masked_fill(~on, 0), torch.where(on, dh_new, dh)
                dc_new = torch.where(on, dc_new, dc) if dc_new is not None and dc is not None else None
            dh, dc = dh_new, dc_new
            found[t] = dg
        all_dg.append(torch.stack([found[t] for t in range(steps)]))
        grad_h0.append(dh)
        if dc is not None:
            grad_c0.append(dc)
    return Backward(
        dg=torch.stack(all_dg, 2).to(out.dtype),
        grad_h0=torch.stack(grad_h0).to(out.dtype),
        grad_c0=torch.stack(grad_c0).to(out.dtype) if grad_c0 else out.new_empty(0),
    )


def _hidden_weight(cell: Cell, weight: Tensor) -> Tensor:
    """Recurrent weights with their gates in the order of ``dg``: a GRU's is (n, r, z)."""
    return weight.roll(weight.shape[-1], 0) if cell.is_gru else weight


def _step_backward(
    cell: Cell,
    dh: Tensor,
    dc: Tensor | None,
    kept: Tensor,
    h_before: Tensor,
    c: Tensor | None,
    c_before: Tensor | None,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Gradient of a step's pre-activations, of h before it but for the product's part, and of c before it."""
    if cell.has_c:
        assert c is not None
        assert c_before is not None
        assert dc is not None
        i, f, g, o = kept.chunk(4, -1)
        tanh_c = c.tanh()
        dc = dc + dh * o * (1 - tanh_c * tanh_c)
        di, df = dc * g * i * (1 - i), dc * c_before * f * (1 - f)
        dg, do = dc * i * (1 - g * g), dh * tanh_c * o * (1 - o)
        return torch.cat([di, df, dg, do], -1), None, dc * f
    if cell.is_gru:
        r, z, n, hn = kept.chunk(4, -1)
        dn = dh * (1 - z) * (1 - n * n)
        dr = dn * hn * r * (1 - r)
        dz = dh * (h_before - n) * z * (1 - z)
        return torch.cat([dn * r, dr, dz, dn], -1), dh * z, None
    slope = 1 - kept * kept if cell.name == "rnn_tanh" else (kept > 0).to(kept.dtype)
    return dh * slope, None, None
