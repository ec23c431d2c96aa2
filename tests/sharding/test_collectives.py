"""The collectives of a compiled program are counted with their bytes."""

import collectives

PROGRAM = """HloModule jit_run
%body (arg: (f32[4])) -> (f32[4]) {
  %sum = (f32[4]{0}, c64[2,3]{1,0}) all-reduce(%a, %b), replica_groups=[2,4]<=[8], to_apply=%add
}
ENTRY %main (x: f32[4]) -> f32[4] {
  %loop = (f32[4]{0}) while(%x), condition=%c, body=%body
  ROOT %all = bf16[8,2]{1,0} all-gather(%x), channel_id=1, replica_groups={{0,1},{2,3}}
}
"""


def test_messages_are_read_with_their_bytes():
    class Compiled:
        def as_text(self):
            return PROGRAM

    gathered, reduced = sorted(collectives.sent(Compiled()), key=lambda message: message.size)
    assert gathered == collectives.Message("all-gather", 2 * 16, 2, False)
    assert reduced == collectives.Message("all-reduce", 4 * 4 + 8 * 6, 4, True)
    counts = {"once": {"all-gather": 1}, "by step": {"all-reduce": 1}}
    assert collectives.messages(Compiled()) == counts
