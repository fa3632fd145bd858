"""`python -m benchmarks.kernels.launches`: a small program whose launches are known."""

from benchmarks.kernels.launches import program_launches

PROGRAM = """\
HloModule jit_decode, is_scheduled=true

%fused (p: f32[4]) -> f32[4] {
  %p = f32[4]{0} parameter(0)
  ROOT %add.9 = f32[4]{0} add(%p, %p)
}

%draw (q: f32[4]) -> f32[4] {
  %q = f32[4]{0} parameter(0)
  %sort.1 = f32[4]{0} sort(%q), dimensions={0}, to_apply=%less
  ROOT %fusion.3 = f32[4]{0} fusion(%sort.1), kind=kLoop, calls=%fused
}

%greedy (q.1: f32[4]) -> f32[4] {
  ROOT %q.1 = f32[4]{0} parameter(0)
}

%command_buffer (r: f32[4]) -> (f32[4], f32[4]) {
  %r = f32[4]{0} parameter(0)
  %fusion.4 = f32[4]{0} fusion(%r), kind=kLoop, calls=%fused
  %copy-start = (f32[4]{0}, f32[4]{0}, u32[]) copy-start(%fusion.4)
  %copy-done = f32[4]{0} copy-done(%copy-start)
  ROOT %tuple.1 = (f32[4]{0}, f32[4]{0}) tuple(%fusion.4, %copy-done)
}

%body (c: (s32[], f32[4])) -> (s32[], f32[4]) {
  %c = (s32[], f32[4]{0}) parameter(0)
  %x = f32[4]{0} get-tuple-element(%c), index=1
  %i = s32[] get-tuple-element(%c), index=0
  %gemm.2 = (f32[4]{0}, s8[16]{0}) custom-call(%x, %x), custom_call_target="__cublas$gemm"
  %call = (f32[4]{0}, f32[4]{0}) call(%x), to_apply=%command_buffer
  %y = f32[4]{0} get-tuple-element(%call), index=0
  %one = s32[] constant(1)
  %conditional.1 = f32[4]{0} conditional(%i, %y, %y), branch_computations={%greedy, %draw}
  ROOT %tuple.2 = (s32[], f32[4]{0}) tuple(%i, %conditional.1)
}

%less (a: f32[], b: f32[]) -> pred[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %lt = pred[] compare(%a, %b), direction=LT
}

%condition (c.1: (s32[], f32[4])) -> pred[] {
  %c.1 = (s32[], f32[4]{0}) parameter(0)
  %i.1 = s32[] get-tuple-element(%c.1), index=0
  ROOT %wrapped_compare = pred[] fusion(%i.1), kind=kLoop, calls=%less
}

ENTRY %main (s: s32[], x.1: f32[4]) -> (s32[], f32[4]) {
  %s = s32[] parameter(0)
  %x.1 = f32[4]{0} parameter(1)
  %wrapped_broadcast = f32[4]{0} fusion(%x.1), kind=kLoop, calls=%fused
  %tuple.3 = (s32[], f32[4]{0}) tuple(%s, %wrapped_broadcast)
  ROOT %while.1 = (s32[], /*index=1*/f32[4]{0}) while(%tuple.3), condition=%condition, body=%body
}
"""


def test_what_a_program_launches():
    """Of a loop one turn, of the branches one, and a copy once."""
    found = program_launches(PROGRAM)
    assert dict(found.kernels) == {
        "gemm": 1, "fusion": 2, "copy-start": 1, "sort": 1, "wrapped_compare": 1,
        "wrapped_broadcast": 1,
    }  # fmt: skip
    assert found.waits == 2


def test_two_layers_more():
    few = program_launches(PROGRAM)
    lines = PROGRAM.splitlines()
    gemm = next(line for line in lines if "%gemm.2" in line)
    more = PROGRAM.replace(gemm, "\n".join([gemm, gemm.replace("gemm.2", "gemm.3")]))
    assert (program_launches(more) - few).kernels["gemm"] == 1
    assert program_launches(more).count == few.count + 1
