package device

import (
	"testing"
	"unicode/utf8"
)

// A name that isn't UTF-8, or that is cut within a letter, is still one that a metric's label may be.
func TestHookNames(t *testing.T) {
	for held, want := range map[string]string{"FORWARD": "FORWARD", "a\xffb": "a\uFFFDb", "caf\xc3": "caf\uFFFD", "": ""} {
		var b [64]byte
		copy(b[:], held)
		if name := hookName(b); name != want || !utf8.ValidString(name) {
			t.Errorf("%q is named %q, want %q", held, name, want)
		}
	}
}

// Functions are found in their roles, whatever their addresses, and no others.
func TestFunctionsOfHooks(t *testing.T) {
	roles := map[uint64]deviceHookRole{}
	for i := range uint64(len(hookRoles)) {
		roles[0xffffffff81000000+i*i*0x40+i*16] = deviceHookRole(1 + i%3)
		f := slotted(roles)
		if !holds(f, roles) {
			t.Fatalf("%d functions: not all are held", len(roles))
		}
		f.Slots[(f.Multiplier>>7)%64] ^= 1 // one more, or one in another role
		if holds(f, roles) {
			t.Errorf("%d functions: another one is held as well", len(roles))
		}
	}
}
