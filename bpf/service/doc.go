// Package service is the Go side of the programs of Services for the sockets of a cgroup (service.c): the maps that
// they share with the programs at devices (lookup.h, service.h), typed, their attachments, and what they report.
package service

//go:generate sh ../generate.sh -type event -type trace -type header -type backend -type load -type endpoint
