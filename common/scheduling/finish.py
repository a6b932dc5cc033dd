"""When is a request finished? One rule for every token, wherever it was sampled."""

from collections.abc import Collection, Sequence

from common.scheduling.request import Place, Request

RUNNING = Place.RUNNING  # a class's attribute is looked up for every token otherwise


def accept_token(request: Request, token_id: int, eos_token_ids: Collection[int], context_length: int) -> bool:
    """Append a sampled token and decide. True: finished, with `finish_reason` and `matched_stop` set.

    A stop token id ends the request always, EOS unless `ignore_eos`; both are counted as output but never printed.
    """
    request.output_ids.append(token_id)
    if token_id in request.sampling.stop_token_ids or (token_id in eos_token_ids and not request.sampling.ignore_eos):
        request.finish_reason, request.matched_stop = "stop", token_id
    elif len(request.output_ids) >= request.max_new_tokens or request.num_tokens >= context_length:
        request.finish_reason = "length"
    return request.finish_reason is not None


def accept_tokens(
    requests: Sequence[Request], token_ids: Sequence[int], may_end: Collection[int]
) -> tuple[list[Request], list[int], list[tuple[Request, int]]]:
    """Append a decode step's tokens, where they cannot end their request; most of a batch, so this loop is kept short.

    may_end: EOS, and what is no token. Returns the requests that go on, with their tokens; and the others, for which accept_token() decides.
    A request that is RUNNING has tokens left beyond this one (running.py), so it does not end by its length.
    """
    going_on: list[Request] = []
    accepted: list[int] = []
    others: list[tuple[Request, int]] = []
    for request, token_id in zip(requests, token_ids, strict=True):
        if request.place is RUNNING and token_id not in may_end and not request.sampling.stop_token_ids:
            request.output_ids.append(token_id)
            going_on.append(request)
            accepted.append(token_id)
        else:
            others.append((request, token_id))
    return going_on, accepted, others
