#include "textflag.h"

// func ticks() int64
TEXT ·ticks(SB), NOSPLIT, $0-8
	RDTSC
	SHLQ $32, DX
	ORQ  DX, AX
	MOVQ AX, ret+0(FP)
	RET

// func ticksAt() uintptr
TEXT ·ticksAt(SB), NOSPLIT, $0-8
	MOVQ $·ticks(SB), AX
	MOVQ AX, ret+0(FP)
	RET
