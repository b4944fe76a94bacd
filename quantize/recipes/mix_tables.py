"""The stock mixes as data: file types, and which of their tensors get another type than the default (docs/formats/mixes.md).

A section holds the roles that are distinguished for a set of file types. A role is recognised by a part of the tensor's name;
the first role that fits counts, and within its table the first row that fits. A row reads

    file types | conditions, joined by &, all of which must hold | type

where `*` stands for any file type, the type `=` for the default, and `a>b c>d` replaces type a by b and type c by d. The
conditions are those of mixes.py.
"""

from __future__ import annotations

from ...data_classes import dataclass
from ..tensor_scale import SCALED_MATRICES

# Default types of the file types that are not named after theirs. The others are: IQ4_K is iq4_k, Q4_K_R4 is q4_k_r4.
DEFAULT_TYPES = {
    "Q2_K_S": "q2_K",
    "Q3_K_S": "q3_K",
    "Q3_K_M": "q3_K",
    "Q3_K_L": "q3_K",
    "Q4_K_S": "q4_K",
    "Q4_K_M": "q4_K",
    "Q5_K_S": "q5_K",
    "Q5_K_M": "q5_K",
    "IQ2_S": "iq2_xs",
    "IQ2_M": "iq2_s",
    "IQ2_M_R4": "iq2_s_r4",
    "IQ3_XS": "iq3_s",
    "IQ3_M": "iq3_s",
    "IQ3_KL": "iq3_k",
    "MXFP4_MOE": "mxfp4",
}
ALIASES = {"Q3_K": "Q3_K_M", "Q4_K": "Q4_K_M", "Q5_K": "Q5_K_M"}
# Values of general.file_type that differ from the default type's own.
FILE_TYPE_IDS = {
    "Q2_K_S": 21,
    "Q3_K_S": 11,
    "Q3_K_M": 12,
    "Q3_K_L": 13,
    "Q4_K_S": 14,
    "Q4_K_M": 15,
    "Q5_K_S": 16,
    "Q5_K_M": 17,
    "IQ2_S": 28,
    "IQ2_M": 29,
    "IQ2_M_R4": 229,
    "IQ3_XS": 22,
    "IQ3_M": 27,
    "IQ3_KL": 146,
    "MXFP4_MOE": 38,
}
# Types without a file type of the same name (docs/formats/types.md).
WITHOUT_FILE_TYPE = ("iq2_s", "iq2_s_r4", "q4_0_4x4", "q4_0_4x8", "q4_0_8x8", "q8_k_r16", "q1_0_g128")

_LOW_BIT_FILE_TYPES = (
    "IQ2_XXS IQ2_XS IQ3_XXS IQ1_S IQ2_S IQ2_M IQ1_M IQ2_K IQ3_K IQ2_KS IQ3_K_R4 IQ3_KS IQ2_K_R4 IQ3_XXS_R4 IQ2_KL IQ2_M_R4 "
    "IQ1_S_R4 IQ1_M_R4 IQ2_KT IQ3_KT IQ1_KT"
)
_OUTPUT = f"""
    MXFP4_MOE NVFP4                                                 |                        | q8_0
    *                                                               | falcon                 | q8_0
    *                                                               | columns % 256          | q8_0
    {_LOW_BIT_FILE_TYPES}                                           | tied                   | iq4_k
    {_LOW_BIT_FILE_TYPES}                                           |                        | q5_K
    IQ2_XXS_R4 IQ2_XS_R4                                            | tied                   | iq4_k_r4
    IQ2_XXS_R4 IQ2_XS_R4                                            |                        | q5_k_r4
    IQ3_S IQ3_M IQ3_KL IQ4_XS IQ3_S_R4 IQ4_KS IQ4_KSS IQ4_KS_R4     | tied                   | iq5_k
    Q8_0 Q8_0_R8 IQ6_K Q6_K_R4 Q8_K_R8 Q8_KV Q8_KV_R8               |                        | =
    *                                                               |                        | q6_K
"""
_EMBEDDING = """
    IQ2_XXS IQ2_XS IQ1_S IQ1_M                                      |                        | q2_K
    IQ2_XXS_R4 IQ2_XS_R4 IQ1_S_R4 IQ1_M_R4                          |                        | q2_K
    IQ2_S IQ2_M IQ2_M_R4 IQ3_XXS IQ3_KT                             |                        | iq3_s
    IQ3_XXS_R4                                                      |                        | iq3_k
    IQ1_BN IQ2_BN IQ2_BN_R4                                         |                        | iq4_nl
    TQ1_0 TQ2_0 Q2_0                                                |                        | q4_K
    MXFP4_MOE NVFP4                                                 |                        | q8_0
"""
_ATTN_V = """
    *                                                               | experts>=4             | q8_0
    *                                                               | 70B                    | q3_K>q5_K q4_K>q5_K iq3_k>iq5_k
    Q2_K                                                            | gqa>=4                 | q4_K
    Q2_K                                                            |                        | q3_K
    IQ2_K                                                           | gqa>=2                 | iq4_k
    IQ2_K                                                           |                        | iq3_k
    IQ2_K_R4                                                        | gqa>=2                 | iq4_k_r4
    IQ2_K_R4                                                        |                        | iq3_k_r4
    Q2_K_S                                                          | gqa>=4                 | q4_K
    Q2_K_R4                                                         | gqa>=4                 | q4_k_r4
    IQ3_XXS                                                         | gqa>=4                 | q4_K
    IQ3_XXS                                                         | gqa>=2                 | iq3_k
    IQ3_XXS                                                         | no imatrix             | iq3_s
    IQ3_XXS                                                         |                        | iq3_xxs
    IQ3_KT                                                          | gqa>=4                 | iq4_k
    IQ3_KT                                                          |                        | iq3_k
    IQ4_KT                                                          | gqa>=4                 | iq5_k
    IQ4_KT                                                          |                        | iq4_k
    IQ3_XXS_R4                                                      | gqa>=4                 | q4_k_r4
    IQ3_XXS_R4                                                      | gqa>=2                 | iq3_k_r4
    IQ3_XXS_R4                                                      | no imatrix             | iq3_k_r4
    IQ3_XXS_R4                                                      |                        | iq3_xxs_r4
    IQ3_XS IQ3_S                                                    | gqa>=2                 | iq4_k
    IQ3_S_R4                                                        | gqa>=2                 | iq4_k_r4
    IQ3_K                                                           | gqa>=2                 | iq4_k
    IQ3_KS IQ2_KL                                                   | gqa>=2                 | iq4_ks
    IQ3_K_R4                                                        | gqa>=2                 | iq4_k_r4
    IQ3_KL IQ3_M                                                    | gqa>=2                 | iq5_k
    IQ3_KL IQ3_M                                                    |                        | iq4_k
    Q3_K_M                                                          | first 2                | q5_K
    Q3_K_M                                                          |                        | q4_K
    Q3_K_L                                                          |                        | q5_K
    IQ4_NL IQ4_XS IQ4_NL_R4 IQ4_XS_R8 IQ4_KS IQ4_KSS                | gqa>=2                 | iq5_k
    IQ4_KS_R4                                                       | gqa>=2                 | iq5_k_r4
    IQ4_K IQ4_K_R4                                                  | gqa>=2                 | iq5_k
    Q4_K_M Q5_K_M                                                   | more bits              | q6_K
    Q4_K_S Q4_K_R4                                                  | first 4                | q5_K
    Q5_K_S                                                          | large vocab            | q6_K
    Q5_K_S                                                          |                        | =
    IQ5_K IQ5_KS                                                    | large vocab            | iq6_k
    IQ5_K IQ5_KS                                                    |                        | =
    *                                                               | gqa>=4                 | q2_K>iq3_s iq3_xxs>iq3_s \
q2_k_r4>iq3_k_r4 iq3_xxs_r4>iq3_k_r4 q3_K>q4_K iq3_s>q4_K iq3_k>iq4_k iq3_ks>iq4_ks iq2_kl>iq4_ks iq3_s_r4>q4_k_r4 \
q3_k_r4>q4_k_r4 q4_K>q5_K iq4_xs>q5_K iq4_nl>q5_K iq4_nl_r4>q5_K iq4_xs_r8>q5_K iq4_k>iq5_k iq4_ks>iq5_k q5_K>q6_K \
iq5_k>iq6_k iq5_ks>iq6_k
"""
_ATTN_K = """
    *                                                               | experts>=4             | q8_0
    IQ3_XS                                                          |                        | iq3_xxs
    IQ3_XXS IQ3_XXS_R4                                              |                        | iq2_s
"""
_ATTN_Q = """
    IQ3_XS                                                          |                        | iq3_xxs
    IQ3_XXS IQ3_XXS_R4                                              |                        | iq2_s
    Q5_K_S                                                          | large vocab            | q4_K
    IQ5_K                                                           | large vocab            | iq4_k
    IQ5_KS                                                          | large vocab            | iq4_ks
"""
_FFN_DOWN = """
    Q2_K                                                            |                        | q3_K
    Q2_K_S                                                          | first 1/8              | q4_K
    Q2_K_R4                                                         | first 1/8              | q4_k_r4
    IQ3_XXS                                                         | no imatrix & first 1/8 | q4_K
    IQ3_XXS                                                         | no imatrix             | q3_K
    IQ3_KT                                                          | no imatrix & first 1/8 | iq4_k
    IQ3_KT                                                          | no imatrix             | iq3_k
    IQ3_XXS_R4                                                      | no imatrix & first 1/8 | q4_k_r4
    IQ3_XXS_R4                                                      | no imatrix             | iq3_k_r4
    Q3_K_M                                                          | first 1/16             | q5_K
    Q3_K_M                                                          | not falcon             | q4_K
    Q3_K_M                                                          | more bits              | q4_K
    Q3_K_M                                                          |                        | q3_K
    IQ3_M                                                           | first 1/8              | iq4_k
    IQ3_M                                                           | experts>=4 & more bits | iq4_k
    Q3_K_L                                                          | falcon                 | q4_K
    Q3_K_L                                                          |                        | q5_K
    IQ3_KL                                                          | more bits              | iq4_ks
    IQ3_KL                                                          |                        | iq3_k
    Q4_K_M                                                          | falcon & first 1/16    | q6_K
    Q4_K_M                                                          | falcon & more bits     | q5_K
    Q4_K_M                                                          | falcon                 | q4_K
    Q4_K_M                                                          | more bits              | q6_K
    IQ4_NL IQ4_XS IQ4_KS IQ4_KSS IQ4_NL_R4 IQ4_XS_R8                | no imatrix & first 1/8 | q5_K
    IQ4_KS_R4                                                       | no imatrix & first 1/8 | q5_k_r4
    Q5_K_M                                                          | more bits              | q6_K
    Q4_K_S Q4_K_R4                                                  | not falcon & first 1/8 | q5_K
    Q4_0                                                            | imatrix & first 1/8    | q4_1
    Q5_0                                                            | imatrix & first 1/8    | q5_1
    Q4_0_R8                                                         | imatrix & first 1/8    | iq4_nl_r4
"""
_ATTN_OUTPUT = """
    Q3_K_L                                                          | falcon                 | q4_K
    *                                                               | falcon                 | =
    Q2_K IQ3_XS IQ3_XXS Q3_K_S Q3_K_M IQ4_NL Q4_K_S Q4_K_M IQ3_S IQ3_M IQ4_XS IQ4_K IQ4_KSS IQ4_KS IQ4_KS_R4 IQ5_KS \
IQ5_KS_R4 IQ2_K IQ3_K IQ3_KL Q4_K_R4 IQ4_NL_R4 IQ4_XS_R8 Q3_K_R4 IQ3_KT IQ3_KS Q2_K_R4 IQ4_K_R4 IQ3_K_R4 IQ2_K_R4 IQ3_XXS_R4 \
IQ3_S_R4                                                            | experts>=4             | q5_K
    IQ2_KL                                                          | experts>=4             | iq4_ks
    *                                                               | experts>=4             | =
    Q2_K                                                            |                        | q3_K
    IQ3_XXS                                                         |                        | iq3_s
    IQ3_KT                                                          | gqa>=4                 | iq3_k
    IQ3_XXS_R4                                                      |                        | iq3_k_r4
    Q3_K_M                                                          |                        | q4_K
    Q3_K_L                                                          |                        | q5_K
    IQ3_M                                                           |                        | iq4_k
    IQ2_K                                                           |                        | iq3_k
    IQ2_K_R4                                                        |                        | iq3_k_r4
    IQ3_KL                                                          |                        | iq4_ks
"""
_FFN_GATE_UP = """
    IQ3_XS                                                          | middle 3/4             | iq3_xxs
    IQ3_KL                                                          | more bits              | iq4_ks
"""


@dataclass(frozen=True)
class Role:
    """Tensors with one of `parts` in their name, if the condition `when` holds.

    rows     the table of their types
    counter  name of the count that gives a tensor's place among the role's tensors (see LayerPosition); '' if none is needed
    """

    parts: tuple[str, ...]
    rows: str
    when: str = ""
    counter: str = ""


@dataclass(frozen=True)
class Section:
    """Roles for these file types, or, if `file_types` is empty, for all that no earlier section names."""

    file_types: str
    roles: tuple[Role, ...]


def _low_bit_roles(
    v: str, qk: str, first: str, qkv: str, shared: str, down: str, output_experts: str, output: str
) -> tuple[Role, ...]:
    """The roles of the families IQ1_*_R4 and IQ2_KT, which differ in the types alone; v: three types, by falling size."""
    v_large, v_medium, v_small = v.split()
    values = f"* | experts>=4 | {v_large}\n* | gqa>=4 | {v_large}\n* | gqa>=2 | {v_medium}\n* | | {v_small}"
    return (
        Role(("attn_v.weight",), values, counter="attn_v"),
        Role(("attn_k",), f"* | | {qk}", when="experts>=8"),
        Role(("blk.0.ffn_down", "blk.0.ffn_gate", "blk.0.ffn_up"), f"* | | {first}", when="experts>=8"),
        Role(("attn_q",), f"* | | {qk}", when="experts>=8"),
        Role(("attn_qkv.weight",), f"* | | {qkv}"),
        Role(("_shexp.weight",), f"* | | {shared}"),
        Role(("ffn_down",), f"* | first 1/8 | {down}", counter="ffn_down"),
        Role(("attn_output.weight",), f"* | experts>=4 | {output_experts}\n* | | {output}"),
    )


_IQ1_IQ2_ROLES = (
    Role(
        ("attn_v.weight",),
        "* | gqa>=4 | iq4_k\n* | experts>=4 | iq4_k\n* | gqa>=2 | iq3_k\n* | experts>=2 | iq3_k\n"
        "IQ2_S IQ2_M IQ2_M_R4 | | iq3_s\n* | | q2_K",
        counter="attn_v",
    ),
    Role(("attn_k", "attn_q"), "* | | q4_K", when="experts>=8"),
    Role(("attn_qkv.weight",), "IQ2_S IQ2_M IQ2_M_R4 | | iq3_xxs\n* | | iq2_k"),
    Role(("ffn_down",), "IQ2_S IQ2_M IQ2_M_R4 | first 1/8 by count | iq3_s\n* | first 1/8 by count | q2_K", counter="ffn_down"),
    Role(
        ("attn_output.weight",),
        "* | experts>=4 | q5_K\nIQ1_S IQ1_M | | iq2_k\nIQ2_S IQ2_M IQ2_M_R4 | | iq3_s",
    ),
)
SECTIONS = (
    Section(
        "IQ1_S_R4 IQ1_M_R4",
        _low_bit_roles(
            "iq4_k_r4 iq3_k_r4 q2_k_r4", "q4_k_r4", "iq3_k_r4", "iq2_k_r4", "iq4_k_r4", "q2_k_r4", "q5_k_r4", "iq2_k_r4"
        ),
    ),
    Section("IQ2_KT", _low_bit_roles("iq4_k iq3_k q2_K", "q4_K", "iq3_k", "iq3_k", "iq4_k", "iq3_k", "q5_K", "iq3_k")),
    # llama.cpp writes NVFP4 only when it converts checkpoints that are in it; here the matrices for whose scale it has a tensor
    # (quantize/tensor_scale.py) become nvfp4, and q8_0 is what it takes for the rest in MXFP4_MOE.
    Section("MXFP4_MOE", (Role(("_exps.weight",), "* | | ="), Role(("",), "* | | q8_0"))),
    Section("NVFP4", (Role(tuple(f".{name}.weight" for name in SCALED_MATRICES), "* | | ="), Role(("",), "* | | q8_0"))),
    Section("IQ2_XXS IQ2_XS IQ1_S IQ2_S IQ2_M IQ1_M IQ2_KS IQ2_XXS_R4 IQ2_XS_R4 IQ2_M_R4", _IQ1_IQ2_ROLES),
    Section(
        "",
        (
            Role(("attn_v.weight",), _ATTN_V, counter="attn_v"),
            Role(("attn_k",), _ATTN_K),
            Role(("attn_q",), _ATTN_Q),
            Role(("ffn_down",), _FFN_DOWN, counter="ffn_down"),
            Role(("attn_output.weight",), _ATTN_OUTPUT),
            Role(("ffn_gate",), _FFN_GATE_UP, counter="ffn_gate"),
            Role(("ffn_up",), _FFN_GATE_UP, counter="ffn_up"),
        ),
    ),
)
OUTPUT_ROLE = Role((), _OUTPUT)
EMBEDDING_ROLE = Role((), _EMBEDDING)
