"""When is a request finished? One rule for every token, wherever it was sampled."""

from collections.abc import Collection

from common.scheduling.request import Request


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
