"""The header of CUDA text that a kernel with score and mask functions includes."""

from __future__ import annotations

from .mods import ELEMENTS, NO_FUNCTION, Backward, Mod

HEADER_NAME = "user/mods.cuh"


def header(score: Mod | None, mask: Mod | None) -> str:
    """The text of the header `HEADER_NAME`: the types ScoreMod and MaskMod."""
    return "\n".join(
        [
            "#pragma once",
            '#include "flex/mods.cuh"',
            *_type_of("ScoreMod", score, "float", "float score, ", "score"),
            *_type_of("MaskMod", mask, "bool", "", "true"),
            "",
        ]
    )


def _type_of(name: str, mod: Mod | None, result: str, first: str, neutral: str) -> list[str]:
    """A type with the captures and numbers of a function as members, which is called as the function is."""
    fields = []
    backward = mod.backward if mod is not None else NO_FUNCTION if first else None
    if mod is not None:
        fields = [
            f"Captured<{ELEMENTS[c.dtype]}, {c.rank}, Layout::{c.layout}> t{i};"
            for i, c in enumerate(mod.captures)
        ]
        fields += [f"{'i64' if n.is_integer else 'float'} n{i};" for i, n in enumerate(mod.numbers)]
    if backward is not None:
        fields.append(f"float* gradients[{max(1, len(backward.gradients))}];")
    arguments = f"{first}int b, int h, int q_idx, int kv_idx, int q_len, int kv_len"
    head = f"[[maybe_unused]] const {name}& mod = *this;"
    return [
        f"struct alignas(8) {name} {{",
        f"static constexpr bool kIsThere = {'false' if mod is None else 'true'};",
        *([] if backward is None else _facts_of(backward)),
        *(fields or ["i64 nothing;"]),
        f"__device__ __forceinline__ {result} operator()({arguments}) const {{",
        head,
        f"return {neutral};" if mod is None else mod.text,
        "}",
        *([] if backward is None else _methods_of(backward, arguments, head)),
        "};",
    ]


def _facts_of(backward: Backward) -> list[str]:
    """Facts about gradients that a kernel knows while it is compiled."""
    bools = {False: "false", True: "true"}
    sites = [f"{{{x.gradient}, {bools[x.by_q]}, {bools[x.by_kv]}}}" for x in backward.sites]
    return [
        f"static constexpr bool kDerivativeIsOne = {bools[backward.is_one]};",
        f"static constexpr int kGradients = {len(backward.gradients)};",
        f"static constexpr int kSites = {len(sites)};",
        f"static constexpr Site kSite[{max(1, len(sites))}] = {{{', '.join(sites)}}};",
    ]


def _methods_of(backward: Backward, arguments: str, head: str) -> list[str]:
    """The functions that cuda_src/flex/mods.cuh describes at `Site`."""
    return [
        f"__device__ __forceinline__ ValueAndDerivative value_and_derivative({arguments}) const {{",
        head,
        "[[maybe_unused]] constexpr float grad = 1.0f;",
        backward.text,
        "}",
        "template <class Sink>",
        "__device__ __forceinline__ void captured_gradients(",
        f"    [[maybe_unused]] float grad, {arguments}, [[maybe_unused]] Sink& gradient_sink) const {{",
        head,
        backward.captured,
        "}",
    ]
