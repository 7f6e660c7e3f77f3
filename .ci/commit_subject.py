"""Checks the subject of a commit message, in the file that git names: a verb first, and at most 72 characters."""

from __future__ import annotations

import re
import sys
from pathlib import Path

LONGEST = 72

#: Verbs that subjects of this repository begin with. A missing one is added here.
VERBS = frozenset(
    """
    accept add adopt align allow announce append apply ask assert assign attach avoid balance batch begin
    benchmark bind bound bring build bump cache call cap capture carry carve catch change check choose clamp
    clarify clean clear close collect combine compare compile complete compute configure copy correct count
    cover cut decide declare decode dedupe define delay delete deprecate derive describe detect disable
    discard document drop emit enable encode end enforce ensure enter exclude exit expand explain export
    expose extend extract fall filter find finish fit fix flag fold follow forbid fork format free generate
    give group guard handle hash hide hoist hold ignore import improve include increase infer initialize
    inline insert install introduce invert isolate join keep label launch lay learn leave let limit link
    lint list load lock log look lower make map mark mask match measure mention merge mock model move name
    narrow normalize note obey omit open optimize order overlap pack pad parse pass permit pick pin place
    plan plot point prefer prefetch prepare preserve prevent print profile propagate prove publish pull push
    put quantize quote raise rank reach read rebuild recognize recompute record recover reduce refactor
    refer reflect refuse register reject relax release rely remember remove rename render reopen reorder
    repair repeat replace report require rescale reserve reset resolve restore restrict retry return reuse
    revert review rewrite rotate round run sample save say scale schedule search select send separate serve
    set shape shard share shorten show shrink sign simplify skip sort specialize specify speed spell split
    stage start state stop store stream stub subtract support swap switch synchronize tag take teach tell
    test tidy tie tighten time trace track translate transpose trim try tune turn type unify unpack unroll
    update upgrade use validate verify wait warn widen wrap write yield
    """.split()  # noqa: SIM905
)

#: Subjects that git writes itself.
_OF_GIT = re.compile(r"(Merge|Revert|fixup!|squash!|amend!) ")


def fault(subject: str) -> str | None:
    """Rule that a subject breaks, in a sentence; None for a good one."""
    if _OF_GIT.match(subject):
        return None
    first = subject.partition(" ")[0]
    if first.lower() not in VERBS:
        return f"begin with a verb, as in 'Add …' or 'Refuse …', not with '{first}'; {Path(__file__).name} lists verbs"
    if len(subject) > LONGEST:
        return f"{len(subject)} characters; allowed: at most {LONGEST}"
    return None


def main() -> None:
    """Read the message, and end with status 1 and the fault of its subject, if it has one."""
    lines = Path(sys.argv[1]).read_text("utf-8").splitlines()
    subject = next((line for line in lines if line.strip() and not line.startswith("#")), "")
    # git itself refuses an empty message
    if subject and (broken := fault(subject)):
        sys.exit(f"commit subject: {broken}\n  {subject}")


if __name__ == "__main__":
    main()
