"""What a backend says of itself to its peers: JSON that names the backend, so that another's is never taken for one's own."""

from typing import TypeVar

import msgspec

from kvtransfer.backend import TransferError


class Description(msgspec.Struct, frozen=True, kw_only=True, tag_field="backend"):
    """A backend's description; the subclass's tag is the backend's name."""

    num_pages: int
    page_nbytes: int


D = TypeVar("D", bound=Description)


def read_description(description: bytes, kind: type[D], page_nbytes: int) -> D:
    """A peer's describe(). Raises TransferError for another backend's, and for pages of another size than `page_nbytes`."""
    try:
        theirs = msgspec.json.decode(description, type=kind)
    except msgspec.DecodeError as error:
        raise TransferError(f"the peer's description is not one of the {kind.__struct_config__.tag} backend: {error}") from error
    if theirs.page_nbytes != page_nbytes:
        raise TransferError(f"the peer's pages have {theirs.page_nbytes} bytes, ours {page_nbytes}")
    return theirs
