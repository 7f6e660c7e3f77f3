"""Kernels of each arch, and evidence for those in CUDA: compiled, verified, measured. docs/cards.md says the same."""

from __future__ import annotations

from dataclasses import dataclass

from attngen.arch import ARCHES


@dataclass(frozen=True, slots=True)
class Support:
    """GPUs of an arch, and how far its kernels have been tested."""

    cards: str
    evidence: str


_RETARGETED = "compiled, verified by retargeting, not measured"

SUPPORT = {
    "sm80": Support("A100, A800, A30", _RETARGETED),
    "sm86": Support("A10, A40, RTX 30", _RETARGETED),
    "sm89": Support("L4, L40S, RTX 40", _RETARGETED),
    "sm90a": Support("H100, H200", "verified and measured"),
    "sm100a": Support("B200", "Triton alone: compiled, not run"),
    "sm120a": Support("RTX 50, RTX PRO", _RETARGETED),
    "ptx80": Support("later GPUs", "PTX: compiled by the driver there; run on an H100"),
}


@dataclass(frozen=True, slots=True)
class KernelKind:
    """A kind of kernel: the arches that have it in CUDA and in Triton.

    ``fields``, as an entry of ``kernels`` writes them, ask for it. Planning decides, not this table, which is for those
    that cannot plan: a test plans each kind for each arch, with the kernels that come with it (append, quantize, …).
    """

    fields: str
    cuda: tuple[str, ...]
    triton: tuple[str, ...] = ()

    def backends(self, arch: str) -> tuple[str, ...]:
        """Backends that have it for an arch, the faster one first."""
        return tuple(name for name, arches in (("cuda", self.cuda), ("triton", self.triton)) if arch in arches)

    @property
    def arches(self) -> tuple[str, ...]:
        """Arches that have it in any backend."""
        return tuple(arch for arch in ARCHES if self.backends(arch))


_ALL = tuple(ARCHES)
#: Arches whose kernels multiply by mma.sync: those of wgmma have these, too.
_MMA = tuple(name for name, arch in ARCHES.items() if not arch.tensor_memory)
_WGMMA = tuple(name for name, arch in ARCHES.items() if arch.wgmma)
#: Arches whose mma.sync and cvt take e4m3.
_8_BITS = tuple(name for name in _MMA if ARCHES[name].capability >= 89)
#: Arches with shared memory for all columns of K and V up to head dim 256 in a backward.
_LARGE = tuple(name for name in _MMA if ARCHES[name].shared_memory >= 163 * 1024)

_LATENT = "head_dim: {qk: 576, v: 512}, v: key"
_E4M3_CACHE = "layout: paged, split_kv: true, kv_dtype: fp8_e4m3"

#: By the name that messages and docs/cards.md have. A variant of ``keys: index`` is called ``listed``.
KINDS = {
    "forward": KernelKind("variant: causal", _MMA, _ALL),
    "forward in fp32": KernelKind("variant: causal, dtype: fp32", (), _ALL),
    "forward in e4m3": KernelKind("variant: causal, dtype: fp8_e4m3", _8_BITS),
    "forward in e5m2": KernelKind("variant: causal, dtype: fp8_e5m2", _WGMMA),
    "scales of blocks or tokens": KernelKind("variant: causal, dtype: fp8_e4m3, descale: 128", _WGMMA),
    "packed heads": KernelKind("variant: causal, pack_gqa: true", _MMA),
    "head dims beyond 256": KernelKind("variant: causal, head_dim: 512", _WGMMA),
    "shared tiles": KernelKind("variant: causal, split_kv: tiles", _WGMMA),
    "keys in pages": KernelKind("variant: causal, layout: paged", _MMA),
    "split-KV": KernelKind("variant: causal, split_kv: true", _MMA),
    "caches in e4m3": KernelKind(f"variant: causal, {_E4M3_CACHE}", _8_BITS),
    "scales of pages": KernelKind(f"variant: causal, {_E4M3_CACHE}, descale: page", _WGMMA),
    "backward": KernelKind("variant: causal, passes: backward", _MMA, _ALL),
    "backward in fp32": KernelKind("variant: causal, passes: backward, dtype: fp32", (), _ALL),
    "backward at head dim 256": KernelKind("variant: causal, passes: backward, head_dim: 256", _LARGE, _ALL),
    "backward beyond head dim 256": KernelKind("variant: causal, passes: backward, head_dim: 512", _WGMMA, _WGMMA),
    "forward-mode derivative": KernelKind("variant: causal, passes: jvp", (), _ALL),
    "forward-mode derivative in fp32": KernelKind("variant: causal, passes: jvp, dtype: fp32", (), _ALL),
    "latent attention": KernelKind(f"variant: causal, layout: paged, {_LATENT}", _WGMMA),
    "backward of latent attention": KernelKind(f"variant: causal, passes: backward, {_LATENT}", _WGMMA),
    "caches of latents in 8 bits": KernelKind(
        f"variant: causal, layout: paged, {_LATENT}, kv_dtype: fp8_mla_656", _WGMMA
    ),
    "keys by index": KernelKind("variant: listed", _MMA),
    "backward of keys by index": KernelKind("variant: listed, passes: backward", _MMA),
    "latent keys by index": KernelKind(f"variant: listed, {_LATENT}", _WGMMA),
    "backward of latent keys by index": KernelKind(f"variant: listed, passes: backward, {_LATENT}", _WGMMA),
    "index scores": KernelKind("variant: causal, passes: index_scores", _WGMMA),
    "scores of blocks": KernelKind("variant: causal, passes: block_scores", _WGMMA),
}
