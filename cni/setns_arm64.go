package cni

import "syscall"

// sysSetns is setns(2).
const sysSetns = syscall.SYS_SETNS
