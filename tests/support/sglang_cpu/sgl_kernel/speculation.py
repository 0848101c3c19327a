"""Speculative decoding's kernels, and the attention that it needs, for SGLang on a CPU.

With these, SGLang's backend "intel_amx" runs models of full attention without and with drafts that
are chains (``speculative_eagle_topk`` 1).
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional


def _attend(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scaling: float
) -> torch.Tensor:
    """Let the last tokens ``[token, head, size]`` of a sequence attend to all before them."""
    num_new, num_all = len(q), len(keys)
    mask = torch.ones(num_new, num_all, dtype=torch.bool).tril(num_all - num_new)
    return functional.scaled_dot_product_attention(
        q.transpose(0, 1)[None], keys.transpose(0, 1)[None], values.transpose(0, 1)[None],
        attn_mask=mask, scale=scaling, enable_gqa=True,
    )[0].transpose(0, 1)  # fmt: skip


def _extend_attention(*arguments: Any) -> None:
    q, _, _, out, keys, values, _, _, slots, rows, lengths, new_lengths, _, _, scaling = arguments[
        :15
    ]
    start = 0
    for row, length, num_new in zip(
        rows.tolist(), lengths.tolist(), new_lengths.tolist(), strict=True
    ):
        own = slice(start, start + num_new)
        used = slots[row, :length].long()
        out[own] = _attend(q[own], keys[used], values[used], scaling)
        start += num_new


def _decode_attention(*arguments: Any) -> None:
    q, keys, values, _, _, out, k, v, written, _, slots, rows, lengths, scaling = arguments[:14]
    keys[written] = k.view(-1, *keys.shape[1:])
    values[written] = v.view(-1, *values.shape[1:])
    for number, (row, length) in enumerate(zip(rows.tolist(), lengths.tolist(), strict=True)):
        used = slots[row, :length].long()
        own = slice(number, number + 1)
        out[own] = _attend(q[own], keys[used], values[used], scaling)


def build_draft_decode_metadata_cpu(
    slots: torch.Tensor, rows: torch.Tensor, lengths: torch.Tensor, topk: int, *sizes: int
) -> torch.Tensor:
    """Return the slots of each sequence, whose drafted tokens follow its others."""
    assert topk == 1
    return slots[rows]


def build_tree_kernel_efficient_cpu(
    parents: torch.Tensor,
    chosen: torch.Tensor,
    lengths: torch.Tensor,
    mask: torch.Tensor,
    positions: torch.Tensor,
    index: torch.Tensor,
    next_token: torch.Tensor,
    next_sibling: torch.Tensor,
    topk: int,
    depth: int,
    width: int,
    mode: int,
) -> None:
    assert topk == 1
    steps = torch.arange(width)
    positions.copy_((lengths[:, None] + steps).ravel())
    index.copy_(torch.arange(index.numel()).view_as(index))
    next_token[:, :-1] = steps[1:]
    mask.copy_(torch.ones(width, width, dtype=torch.bool).tril().repeat(len(lengths), 1).ravel())


def verify_tree_greedy_cpu(
    predicts: torch.Tensor,
    accept_index: torch.Tensor,
    accept_token_num: torch.Tensor,
    candidates: torch.Tensor,
    target_predict: torch.Tensor,
    **links: torch.Tensor,
) -> None:
    """Accept drafted tokens, a chain in each row, as long as the model says the same."""
    width = candidates.shape[1]
    for row, (drafted, wanted) in enumerate(
        zip(candidates.tolist(), target_predict.tolist(), strict=True)
    ):
        count = 0
        while count + 1 < width and drafted[count + 1] == wanted[count]:
            count += 1
        accept_token_num[row] = count
        places = torch.arange(row * width, row * width + count + 1)
        accept_index[row, : count + 1] = places
        predicts[places] = target_predict[row, : count + 1].to(predicts.dtype)


def assign_draft_cache_locs_contiguous_cpu(
    rows: torch.Tensor,
    slots: torch.Tensor,
    lengths: torch.Tensor,
    out: torch.Tensor,
    num_columns: int,
    topk: int,
    num_steps: int,
) -> None:
    assign_extend_cache_locs_cpu(rows, slots, lengths, lengths + topk * num_steps, out)


def assign_extend_cache_locs_cpu(
    rows: torch.Tensor,
    slots: torch.Tensor,
    starts: torch.Tensor,
    ends: torch.Tensor,
    out: torch.Tensor,
    num_columns: int = 0,
) -> None:
    bounds = zip(rows.tolist(), starts.tolist(), ends.tolist(), strict=True)
    found = torch.cat([slots[row, start:end] for row, start, end in bounds])
    out[: len(found)] = found.to(out.dtype)


def assign_req_to_token_pool_cpu(
    rows: torch.Tensor,
    slots: torch.Tensor,
    starts: torch.Tensor,
    ends: torch.Tensor,
    new: torch.Tensor,
    num_columns: int,
) -> None:
    done = 0
    for row, start, end in zip(rows.tolist(), starts.tolist(), ends.tolist(), strict=True):
        slots[row, start:end] = new[done : done + end - start].to(slots.dtype)
        done += end - start


def fill_bonus_tokens_cpu(
    tokens: torch.Tensor, lengths: torch.Tensor, out: torch.Tensor, stride: int
) -> None:
    out.copy_(tokens.ravel()[torch.arange(len(lengths)) * stride + lengths.long() - 1])


def fill_accept_out_cache_loc_cpu(
    index: torch.Tensor, slots: torch.Tensor, out: torch.Tensor
) -> None:
    found = slots[index[index > -1].long()]
    out[: len(found)] = found


def copy_all_layer_kv_cache_cpu(
    pointers: torch.Tensor, strides: torch.Tensor, targets: torch.Tensor, sources: torch.Tensor
) -> None:
    """Move nothing: what is accepted of a chain is where it belongs."""
    assert torch.equal(targets, sources)


vars(torch.ops.sgl_kernel)["extend_attention_cpu"] = _extend_attention
vars(torch.ops.sgl_kernel)["decode_attention_cpu"] = _decode_attention
