package cni

// sysSetns is setns(2).
const sysSetns = 308
