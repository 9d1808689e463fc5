"""TensorPage: a page seen as a tensor, shared by every handle of it."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch._C import DisableTorchFunctionSubclass

from zinf_core.errors import UnsupportedError
from zinf_core.keys import TensorKey
from zinf_core.runtime.page import Page

if TYPE_CHECKING:
    from zinf_core.buffers import Buffer
    from zinf_core.runtime.pager import Pager
    from zinf_torch.compute import Compute

set_data = torch.Tensor.data.__set__  # type: ignore[attr-defined]
get_version = torch.Tensor._version.__get__  # type: ignore[attr-defined]


class ResidentPages:
    """Finds the resident page a storage belongs to, in the memory of `compute`.

    An entry outlives the residency of its page; `find` therefore checks that the page still has
    a view. Guarded by the lock of the pager.
    """

    __slots__ = ("_by_address", "compute", "norm_order")

    def __init__(self, compute: Compute) -> None:
        """Start with no page."""
        self.compute = compute
        self.norm_order: float | None = None
        """Order of the norm that was asked of a gradient last: of later ones it is taken when
        they are stored, while their bytes are at hand."""
        self._by_address: dict[int, weakref.ref[TensorPage]] = {}

    def note(self, address: int, page: TensorPage) -> None:
        """Note that the storage at `address` is the memory of `page`."""
        self._by_address[address] = weakref.ref(page)

    def forget(self, address: int, page: TensorPage) -> None:
        """Forget the entry if it is still the one of `page`."""
        entry = self._by_address.get(address)
        if entry is not None and entry() is page:
            del self._by_address[address]

    def find(self, tensor: torch.Tensor) -> TensorPage | None:
        """Return the page whose memory `tensor` is a view of, or None."""
        if tensor.layout is not torch.strided:
            return None
        address = tensor.untyped_storage().data_ptr()
        entry = self._by_address.get(address)
        page = None if entry is None else entry()
        if page is None or page.page.view is None or page.address != address:
            return None
        return page


@dataclass(frozen=True, slots=True)
class KnownNorm:
    """The norm of a page's values as they were after so many edits."""

    order: float
    edits: int
    value: torch.Tensor


class TensorPage:
    """Shape, dtype and bytes of one stored tensor.

    Handles are tensor objects that stand for the page: they show the true shape, dtype and
    device, and a stride-0 placeholder as data whenever no operation runs on them. Guarded by the
    lock of the pager.
    """

    __slots__ = (
        "__weakref__",
        "_handles",
        "_untraced",
        "address",
        "dtype",
        "edits",
        "factors",
        "is_removed",
        "key",
        "label",
        "norm",
        "page",
        "pager",
        "placeholder",
        "registry",
        "shape",
        "stride",
        "version",
    )

    def __init__(
        self,
        pager: Pager,
        registry: ResidentPages,
        key: TensorKey,
        *,
        like: torch.Tensor,
        home: str,
    ) -> None:
        """Reserve room on tier `home` for a tensor of the shape, stride and dtype of `like`.

        `like` must have at least one element. Overlapping or gapped strides are stored
        contiguously. Raises TierFullError, or UnsupportedError for sparse and quantized tensors.
        """
        if like.layout is not torch.strided or like.is_quantized:
            raise UnsupportedError(f"{key}: only dense tensors can be paged, not {like.layout}")
        self.pager = pager
        self.registry = registry
        self.key = key
        self.label = str(key)
        self.dtype = like.dtype
        self.shape = like.shape
        self.stride = dense_stride(like)
        self.placeholder = _placeholder(like, registry.compute.device)
        self.address = 0
        self.version = 0
        """Counts edits that autograd must notice, as `Tensor._version` does."""
        self.is_removed = False
        self.edits = 0
        """Counts every edit that was noticed."""
        self.factors: list[Any] = []
        """What the stored values are still to be multiplied by, see `zinf_torch.scaling`."""
        self.norm: KnownNorm | None = None
        self._handles: list[weakref.ref[Any]] = []
        self._untraced = False
        nbytes = like.numel() * like.element_size()
        self.page: Page = pager.add(key, nbytes, home, self)

    # -- PageClient ----------------------------------------------------------------------------

    def open_view(self, buffer: Buffer) -> torch.Tensor:
        """Return the tensor over `buffer` and take every handle's version as seen."""
        with (
            torch.inference_mode(mode=False),
            DisableTorchFunctionSubclass(),
            torch._C._DisableTorchDispatch(),  # not an operation of the user's
        ):
            flat = self.registry.compute.tensor(buffer).view(self.dtype)
            view = flat.as_strided(self.shape, self.stride)
        address = view.data_ptr()
        if address != self.address:
            self.registry.forget(self.address, self)
            self.address = address
        self.registry.note(address, self)
        return view

    def was_written(self) -> bool:
        """Return whether a handle, or a view made through one, may have been written to."""
        written = self._untraced
        self.edits += written
        with DisableTorchFunctionSubclass():
            for handle in self.handles():
                written = self.note_version(handle) or written
        return written

    def close_view(self) -> None:
        """Know that nothing writes to the bytes unseen any more."""
        self._untraced = False

    # -- handles -------------------------------------------------------------------------------

    def adopt_handle(self, handle: Any) -> None:
        """Make `handle`, an instance of a class of `zinf_torch.parameter`, stand for this page."""
        with DisableTorchFunctionSubclass():
            handle.zinf_page = self
            handle.zinf_uses = 0
            set_data(handle, self.placeholder)
            handle.zinf_seen = get_version(handle)
        self._handles = [ref for ref in self._handles if ref() is not None]
        self._handles.append(weakref.ref(handle))

    def forget_handle(self, handle: Any) -> None:
        """Have `handle` stand for this page no longer; the caller makes it something else."""
        self._handles = [ref for ref in self._handles if ref() is not None and ref() is not handle]

    def handles(self) -> Iterator[Any]:
        """Iterate over the handles that are alive."""
        for ref in self._handles:
            handle = ref()
            if handle is not None:
                yield handle

    def enter(self, handle: Any) -> None:
        """Pin the page and show its bytes in `handle` until the matching `leave`. May block."""
        with self.pager.lock:
            if self.factors:
                scale_page(self)
            view = self.pager.pin(self.page)
            if handle.zinf_uses == 0:
                if self.note_version(handle):  # written through a view since its last operation
                    self.pager.mark_dirty(self.page)
                set_data(handle, view)
            handle.zinf_uses += 1

    def leave(self, handle: Any) -> None:
        """Undo one `enter`; what was written through the handle is dirty from now on."""
        with self.pager.lock:
            if self.note_version(handle):
                self.pager.mark_dirty(self.page)
            handle.zinf_uses -= 1
            if handle.zinf_uses == 0:
                set_data(handle, self.placeholder)
            self.pager.unpin(self.page)

    def note_version(self, handle: Any) -> bool:
        """Return whether `handle` was written to since this was asked last."""
        version = get_version(handle)
        if version == handle.zinf_seen:
            return False
        handle.zinf_seen = version
        self.edits += 1
        if handle.zinf_counts_edits:
            self.version += 1
        return True

    def note_edit(self) -> None:
        """Count an edit that autograd must notice and that no handle saw."""
        with self.pager.lock:
            self.edits += 1
            self.version += 1

    def edits_so_far(self) -> int:
        """Return `edits`, including what was written to the resident bytes until now."""
        with self.pager.lock:
            if self.page.view is not None and self.was_written():
                self.pager.mark_dirty(self.page)
            return self.edits

    @contextmanager
    def pinned(self) -> Iterator[torch.Tensor]:
        """Lend the resident bytes for the duration of a block. May block."""
        with self.pager.lock:
            if self.factors:
                scale_page(self)
            view = self.pager.pin(self.page)
        try:
            yield view
        finally:
            self.pager.unpin(self.page)

    def note_untraced(self) -> None:
        """From now until eviction, take the page as dirty: something that does not count
        versions (numpy, a view of `.data`) can write to it."""
        with self.pager.lock:
            self._untraced = True

    def fill(self, value: torch.Tensor) -> None:
        """Give the page the values of `value`, whatever it had before. May block.

        `value` may be a handle, also of this page.
        """
        source: TensorPage | None = getattr(value, "zinf_page", None)
        if source is self:
            return
        if source is not None:
            value = source.clone()
        with self.pager.lock, torch.no_grad(), DisableTorchFunctionSubclass():
            view = self.pager.create(self.page)
            view.copy_(value)
            self.factors.clear()
            self.edits += 1

    def meta(self) -> torch.Tensor:
        """Return a meta tensor of this page's shape, stride and dtype."""
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device="meta")

    def clone(self) -> torch.Tensor:
        """Return a plain tensor with the page's values and stride, in memory of its own."""
        with (
            self.pinned() as view,
            torch.no_grad(),
            DisableTorchFunctionSubclass(),
        ):
            device = self.registry.compute.device
            copy = torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=device)
            return copy.copy_(view)

    def over(self, buffer: Buffer) -> torch.Tensor:
        """Return a tensor of this page's shape, stride and dtype over `buffer`, in host memory."""
        flat = torch.from_numpy(buffer.array).view(self.dtype)
        return flat.as_strided(self.shape, self.stride)

    def release_handles(self) -> None:
        """Turn handles that are still alive into plain tensors with values of their own."""
        with self.pager.lock:
            for handle in self.handles():
                copy = self.clone()
                with DisableTorchFunctionSubclass():
                    handle.__class__ = torch.nn.Parameter if handle.requires_grad else torch.Tensor
                    set_data(handle, copy)
                for name in ("zinf_page", "zinf_uses", "zinf_seen"):
                    delattr(handle, name)
            self._handles.clear()

    def drop(self) -> None:
        """Forget the values; handles that user code still holds keep theirs as plain tensors."""
        with self.pager.lock:
            if self.page.has_bytes:
                self.release_handles()
            self._untraced = False
            self.factors.clear()
            self.norm = None
            self.pager.drop(self.page)

    def remove(self) -> None:
        """Forget the page and free its room at home."""
        with self.pager.lock:
            self.drop()
            self.pager.remove(self.page)
            self.is_removed = True


def scale_page(page: TensorPage) -> None:
    """Multiply the values by `TensorPage.factors` now. May block."""
    with (
        page.pager.lock,
        torch.no_grad(),
        DisableTorchFunctionSubclass(),
        torch._C._DisableTorchDispatch(),  # not an operation of the user's
        page.pager.pinned(page.page) as view,
    ):
        factors, page.factors = page.factors, []
        for factor in factors:
            view.mul_(factor)
        page.pager.mark_dirty(page.page)


def successor(page: TensorPage, value: torch.Tensor) -> TensorPage:
    """Return a page at the home of `page` with the values, shape, stride and dtype of `value`."""
    key, number = page.key, 1
    while page.pager.has(key):
        number += 1
        key = TensorKey(page.key.name, page.key.kind_value, f"#{number}")
    made = TensorPage(page.pager, page.registry, key, like=value, home=page.page.home)
    made.label = page.label
    made.fill(value.detach())
    return made


def dense_stride(tensor: torch.Tensor) -> tuple[int, ...]:
    """Return the strides to store `tensor` with: its own if they cover memory without gaps or
    overlap, else contiguous ones."""
    order = sorted(range(tensor.ndim), key=lambda dim: (tensor.stride(dim), tensor.size(dim)))
    expected = 1
    for dim in order:
        if tensor.size(dim) == 1:
            continue
        if tensor.stride(dim) != expected:
            return torch.empty(tensor.shape, device="meta").stride()
        expected *= tensor.size(dim)
    return tensor.stride()


def _placeholder(like: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return a stride-0 tensor of the shape of `like`: NaN, so that a use that escapes paging
    shows, where the dtype has one."""
    with torch.inference_mode(mode=False):
        fill = float("nan") if like.dtype.is_floating_point or like.dtype.is_complex else 0
        return torch.full((), fill, dtype=like.dtype, device=device).expand(like.shape)
