// Package reconcile is the one loop that every data plane shares: it learns which parts of the model are wanted, and
// makes the kernel hold exactly the facts that a plane renders for them.
//
// A plane brings three verbs (dataplane.Plane); the loop makes of them:
//
//   - start: Read first. Facts held and wanted are left alone, so that a restart flushes nothing; what nothing wants
//     any more goes last, after all that is new.
//   - change: the difference alone is rendered, compared and written. The cost follows the change, not the world.
//   - failure: after an error nothing is assumed. Read, compare, try again with back-off; a fact that the kernel goes
//     on refusing is found by halving, or named by the plane (dataplane.Refused), and set aside with what stands on it,
//     and everything else is written. Groups of such facts come last, and facts of the base, which all others need, are
//     never set aside with others.
//   - replacement: a fact that holds all others (dataplane.Foundation) gets another value in one Write of everything
//     that is wanted, and what is held stays in force until that succeeds. The fact that the kernel refuses is found by
//     trying Writes (dataplane.Checker); one of the base leaves all as it is.
//   - closing: parts that depend on refused ones are wanted in another form (Options.StandIns), which is written before
//     anything else, until nothing is refused any more.
//   - drift: what others do to the slice is seen (dataplane.Watcher), counted and undone.
//   - plan: the same comparison, written nowhere.
//   - memory: a fact that is as wanted is known by two hashes and a count. Its key, its value and what only a Write
//     needs of it (its body) are rendered anew where it has to be written once more, or is listed.
//   - waiting: for everything (Sync), or for the parts of one owner, whatever becomes of others' (SyncOwner).
//
// Where a batch has large groups, smaller ones come first, complete, then what of the base stands above them all: a
// cold start serves them before the large ones are there. That order needs no age. A base that changes over to new
// values (another version's hooks) waits for all groups, since the old one serves them; so does what After
// defers.
//
// What a plane can rely on: Write gets put by rising rank and del by falling rank; a key whose value changes stands in
// both, never in two Writes; a change that fits (Options.MaxFacts) comes as one Write. Where it has to be cut, the cuts
// follow that same order, so each state in between is safe: nothing is true before what it stands on, and nothing goes
// before what stands on it has gone or been rewritten. Verbs are never called at the same time, except Render, which is
// pure.
//
// What a plane must hold to: a Write that is not all at once stops at the first rejection, or at the first rank of
// which it names the refused; equal parts render equal facts; two parts never render different values for one key (the
// loop keeps the first and names both owners in Status); Read returns a key once.
//
// Runner is a loop of any plane: what runs several holds those.
//
// The loop knows no network word and no Kubernetes, keeps no timer while idle, and alone of all packages below cmd
// writes a log.
package reconcile
