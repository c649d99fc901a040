"""Instructions (PTX) that widen the eight nibbles of a register: first the low ones of its bytes, then the high ones.
Left to itself the compiler converts one element after the other, by five to eight instructions; so it is less than two.
The register is not read behind the first result: they may share one.
"""

TO_E4M3 = """{
.reg .b32 index, later, below, above, pick, first, second;
and.b32 index, $2, 0x77777777;
prmt.b32 below, 0xCACCCED0, 0xB8C0C4C8, index;
prmt.b32 above, 0x44403800, 0x4E4C4A48, index;
shr.b32 pick, $2, 1;
lop3.b32 pick, pick, 0x4444, 0x3210, 0xEA;
prmt.b32 first, below, above, pick;
shr.b32 later, index, 16;
prmt.b32 below, 0xCACCCED0, 0xB8C0C4C8, later;
prmt.b32 above, 0x44403800, 0x4E4C4A48, later;
shr.b32 pick, $2, 17;
lop3.b32 pick, pick, 0x4444, 0x3210, 0xEA;
prmt.b32 second, below, above, pick;
prmt.b32 $0, first, second, 0x6420;
prmt.b32 $1, first, second, 0x7531;
}"""
"""Less 8, in four bytes a register. Three bits are an index among the numbers below 8, and among those above; the
fourth picks one of the two."""

TO_INT8 = """{
.reg .b32 low, high;
shr.b32 high, $2, 4;
lop3.b32 low, $2, 0x0F0F0F0F, 0x80808080, 0xEA;
lop3.b32 high, high, 0x0F0F0F0F, 0x80808080, 0xEA;
sub.u32 low, low, 0x08080808;
sub.u32 high, high, 0x08080808;
xor.b32 $0, low, 0x80808080;
xor.b32 $1, high, 0x80808080;
}"""
"""Less 8, in four bytes a register. The highest bit of a byte lends to the subtraction, and is turned into the sign."""

ABOVE = 128
"""What is added in TO_FLOAT32."""

TO_FLOAT32 = """{
.reg .b32 low, high;
shr.b32 high, $8, 4;
and.b32 low, $8, 0x0F0F0F0F;
and.b32 high, high, 0x0F0F0F0F;
prmt.b32 $0, low, 0x00000043, 0x4055;
prmt.b32 $1, low, 0x00000043, 0x4155;
prmt.b32 $2, low, 0x00000043, 0x4255;
prmt.b32 $3, low, 0x00000043, 0x4355;
prmt.b32 $4, high, 0x00000043, 0x4055;
prmt.b32 $5, high, 0x00000043, 0x4155;
prmt.b32 $6, high, 0x00000043, 0x4255;
prmt.b32 $7, high, 0x00000043, 0x4355;
}"""
"""Plus ABOVE, a number a register: its upper half is the bfloat16 whose last bit is worth one."""
