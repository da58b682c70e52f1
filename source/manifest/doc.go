// Package manifest is a source of Kubernetes objects that reads ordinary YAML and JSON: a folder with everything below
// it, one file, or standard input.
//
// It says what is written and no more: objects of the k8s.io/api types, with the defaults an API server would have set,
// and problems. It does not judge how objects fit together (two Services with one cluster IP, an endpoint on loopback):
// that is for package resolve.
//
// # What is read
//
// Files named *.yaml, *.yml and *.json, in subfolders too; names that begin with a dot and editors' leftovers are not
// looked at. Symbolic links are followed, also to folders, and every link on the way to a file is watched, so that the
// "..data" swap of a ConfigMap volume is seen. A document is one object, a List, or a typed list such as a ServiceList;
// an item of a List may be a List. Text is UTF-8, or UTF-16 with a byte order mark; lines end with LF, CRLF or CR. YAML
// is read as kubectl reads it, with merge keys ("<<"). Text behind the end of a document is an error, never left out.
// Decoding is strict, as with kubectl: unknown and repeated fields, wrong types and values that an API server would
// refuse are named with their field. An object without a namespace is in "default". Where two documents say the same
// object, the first by path, then by place in the file, counts; the other is named and takes its place once it is gone.
//
// Workloads are ignored: an agent follows the pods that a cluster runs of them. LoadTemplates, for tools that evaluate
// a repository, has Pods stand for their pod templates.
//
// Whoever writes these files has the node, or is trusted with it: what they hold has no bound, as it has where tenants
// write (package kube).
//
// # When it is read
//
// A file takes effect when its writer closes it, when it is moved or linked here, and when it is removed: never in the
// middle of a write. Linux tells of all these (inotify); nothing is polled. What a program still holds open for writing
// keeps its last good content, and after a second a problem says so. A file that is gone, or has become empty, is given
// 10 ms to return: that is how many programs save. Renames inside the folder need no such wait. Only the file that
// changed is read again, and only the documents in it that changed are decoded.
//
// # What stays
//
// A document that plainly is of a kind or group that Fairlead doesn't read is ignored, whatever is wrong in it. Nothing
// else goes away because something can't be read:
//
//   - A document that parses but is refused keeps the last good content of the object that it names.
//   - A document whose kind or name can't be made out may be any of the file's, and the file may be cut short: until it
//     is mended, every object that the file held before, and that is not in it now, stays. Objects that the rest of the
//     file says follow the file.
//   - A file or a folder that can't be read, and a link that leads nowhere, keep all they held.
//   - If the folder itself goes (or the file, where the source is one file), all stays until it is back. A folder that
//     is emptied file by file is an empty folder.
//
// The problem has Kept set in each case.
//
// # What is left out of an object
//
// Memory counts, so what nothing reads is dropped once an object has been checked: apiVersion and kind (the Go type
// says them, as with informers); of metadata all but name, namespace, labels, annotations (without kubectl's
// last-applied-configuration), creationTimestamp and deletionTimestamp; labels of policies and annotations of Pods
// but fairlead.dev/allowed-sources; a Service's status.conditions; a ClusterNetworkPolicy's status; an endpoint's
// hostname, deprecated topology and all of targetRef but a Pod's namespace and name; all of a Node but podCIDRs,
// unschedulable, taints, providerID, addresses and conditions; of a Namespace's status all but the phase; of a Pod all
// but nodeName, hostNetwork, containers' (and init containers') names, ports and restart policy, and of its status the
// phase and addresses.
// Text that repeats (nodes, zones, namespaces, labels) and the pointers to it are shared: treat objects as read-only.
package manifest
