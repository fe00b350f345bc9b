"""Problems of attention in one kernel, of the transformer's operations, and of several GPUs."""
import numpy as np

from ...kernels import attention, peer_pieces, peer_reduce, quantise
from ...kernels.attention import (
    sla,
)
from ...kernels.diffusion import class_dropout, vlb
from ...kernels.transformer import adaln, bias_gelu, chunk, columns, gate, gate_adaln, patchify, qk_norm_rope, swiglu
from .problem import CLASSES, HEAD, HEADS, PARAMETERS, SEED, STEP, TIMESTEPS, TOKENS, D, N, T, half, integers, single


def columns_backward(partial, count):
    """dx of `columns`, from the partial sums (B, chunks, count · C) that the operations on its parts have left."""
    B, _, width = partial.shape
    sums = columns.Sums((B, width))
    sums.partial = partial
    return columns.columns_backward([columns.ColumnSums(sums, k * width // count, width // count)
                                     for k in range(count)])


def add_problems(add, rng, labels):
    heads = {"heads": HEADS, "order": "new"}
    attended = {"dy": half(N, T, D), "qkv": half(N, T, 3 * D), "y": TOKENS, "logsumexp": single(N, HEADS, T), **heads}
    add(attention.flash_attention_forward,
        qkv=half(N, T, 3 * D), **heads)
    add(attention.flash_attention_backward,
        **attended)
    add(attention.flash_attention_forward,
        qkv=single(8, 1024, 3 * 512), heads=8)
    add(attention.flash_attention_backward,
        dy=single(8, 1024, 512), qkv=single(8, 1024, 3 * 512), y=single(8, 1024, 512), logsumexp=single(8, 8, 1024),
        heads=8)
    # 256 × 256 and 512 × 512 pixels in patches of 4; DiT-XL's heads
    for length, least, count, head in ((4096, 1, HEADS, HEAD), (16384, 2, HEADS, HEAD), (4096, 1, 16, 72)):
        blocks, width = length // 64, count * head
        lists = np.stack([np.sort(rng.permutation(blocks)[:sla.count_of(0.05, blocks)]) for _ in range(count * blocks)])
        kept = sla.Kept(integers(lists.reshape(1, count, blocks, -1)), single(1, count, length),
                        single(1, count, length), half(1, count, blocks, head, head), single(1, count, blocks, head))
        layer = {"weight": half(head, head), "bias": single(head), "heads": count, "order": "new"}
        add(sla.sla_forward, versions=tuple(range(least, 4)), qkv=half(1, length, 3 * width), topk=0.05, **layer)
        add(sla.sla_backward, versions=tuple(range(least, 3)), dy=half(1, length, width),
            qkv=half(1, length, 3 * width), y=half(1, length, width), kept=kept,
            dweight=single(head, head), dbias=single(head), **layer)
    shift, amax = half(N, D), integers(np.zeros(quantise.PARTIALS), np.uint32)
    add(adaln.adaln_forward, x=TOKENS, shift=shift, scale=shift)
    add(adaln.adaln_backward, dy=TOKENS, x=TOKENS, scale=shift, mean=single(N * T), rstd=single(N * T))
    add(gate.gate_forward, x=TOKENS, h=TOKENS, gate=shift)
    add(gate.gate_backward, dy=TOKENS, h=TOKENS, gate=shift)
    add(gate_adaln.gate_adaln_forward, x=TOKENS, h=TOKENS, gate=shift, shift=shift, scale=shift)
    add(gate_adaln.gate_adaln_backward, dz=TOKENS, dy=TOKENS, z=TOKENS, h=TOKENS, gate=shift, shift=shift,
        scale=shift, mean=single(N * T), rstd=single(N * T))
    add(gate_adaln.gate_adaln_backward, note="of x", dz=TOKENS, dy=TOKENS, z=None, h=TOKENS, gate=shift, shift=shift,
        scale=shift, mean=single(N * T), rstd=single(N * T), x=TOKENS)
    add(gate_adaln.gate_adaln_forward, versions=(2,), note="to E4M3", x=TOKENS, h=TOKENS, gate=shift, shift=shift,
        scale=shift, into=[single(1), amax])
    add(gate_adaln.gate_adaln_backward, versions=(2,), note="to E4M3", dz=TOKENS, dy=TOKENS, z=TOKENS, h=TOKENS,
        gate=shift, shift=shift, scale=shift, mean=single(N * T), rstd=single(N * T), dh_into=[single(1), amax])
    for note, given in (("RMSNorm", {"shift": shift}), ("RMSNorm, no shift", {"shift": None})):
        given = {"scale": shift, "weight": single(D), **given}
        back = {"rstd": single(N * T), "dweight": single(D)}
        add(adaln.adaln_forward, x=TOKENS, norm="rms", note=note, **given)
        add(adaln.adaln_backward, dy=TOKENS, x=TOKENS, scale=shift, weight=single(D), mean=None, note=note,
            need_dshift=given["shift"] is not None, **back)
        seam, alone = {"h": TOKENS, "gate": shift}, {"h": None, "gate": None}
        gradients = {"dz": TOKENS, "dy": TOKENS, "z": TOKENS, "mean": None, **back}
        add(gate_adaln.gate_adaln_forward, x=TOKENS, norm="rms", note=note, **seam, **given)
        add(gate_adaln.gate_adaln_backward, note=note, **gradients, **seam, **given)
        add(gate_adaln.gate_adaln_forward, x=TOKENS, norm="rms", note=f"{note}, no gate", **alone, **given)
        add(gate_adaln.gate_adaln_backward, note=f"{note}, no gate", **gradients, **alone, **given)
    add(bias_gelu.bias_gelu_forward, x=half(N, T, 4 * D), bias=single(4 * D))
    add(bias_gelu.bias_gelu_backward, dy=half(N, T, 4 * D), x=half(N, T, 4 * D), bias=single(4 * D),
        dbias=single(4 * D))
    turn = {"heads": HEADS, "q_weight": single(D // HEADS), "k_weight": single(D // HEADS),
            "rotation": single(2, T, D // HEADS), "in_place": True}
    add(qk_norm_rope.qk_norm_rope_forward, qkv=half(N, T, 3 * D), **turn, note="training")
    add(qk_norm_rope.qk_norm_rope_forward, qkv=half(N, T, 3 * D), **turn, keeps=False)
    add(qk_norm_rope.qk_norm_rope_backward, dy=half(N, T, 3 * D), kept=half(N, T, 2 * D), **turn,
        dq_weight=single(D // HEADS), dk_weight=single(D // HEADS))
    hidden = 8 * D // 3
    add(swiglu.swiglu_forward, x=half(N, T, 2 * hidden))
    add(swiglu.swiglu_backward, dy=half(N, T, hidden), x=half(N, T, 2 * hidden))
    latents = single(N, 32, 32, 4)
    add(patchify.patchify_forward, x=half(N, 32, 32, 4), patch=2)
    add(patchify.unpatchify_forward, tokens=single(N, T, 32), patch=2, height=32, width=32)
    add(chunk.chunk_forward, x=half(N, 6 * D), count=6)
    add(columns_backward, partial=single(N, 4, 6 * D), count=6)
    samples = integers(np.arange(N), np.uint32)
    add(class_dropout.class_dropout_forward, labels=labels, probability=0.1, null_class=CLASSES, seed=SEED, step=STEP,
        samples=samples)
    table = single(TIMESTEPS)
    hybrid = {"prediction": single(N, 32, 32, 8), "target": latents, "x_0": latents,
              "t": integers(rng.integers(0, TIMESTEPS, N)), "k": table, "low": table, "width": table, "weight": 1.44}
    add(vlb.hybrid_loss_forward, **hybrid)
    add(vlb.hybrid_loss_backward, **hybrid)
    flat = single(PARAMETERS)
    add(peer_reduce.peer_reduce_scatter, note="both ranks' arrays on one card", buffers=[flat, flat],
        rank=0, moved=3 * 4 * PARAMETERS // 2)
    add(peer_pieces.peer_copy_pieces, note="both ranks' arrays on one card", buffers=[flat], y=flat,
        pieces=integers(peer_pieces.pieces_of([(0, 0, 0, PARAMETERS // 4)]), np.int64), moved=2 * PARAMETERS)
