"""Random training programs on real ranks against a model of what they mean.

Without LAZYREDUCE_FUZZ_PROGRAMS the same programs run every time; it asks for so many others. A failure shows the
program and what hypothesis needs to repeat it.
"""

import os

import pytest
from hypothesis import HealthCheck, Phase, given, note, settings
from hypothesis import strategies as st

from .fuzz_program import draw, run
from .fuzz_reference import check

LONG = int(os.environ.get("LAZYREDUCE_FUZZ_PROGRAMS") or 0)
SHARE = {1: 0.15, 2: 0.4, 3: 0.25, 4: 0.2}  # of the programs, for each number of ranks
PROGRAMS = LONG or 300

profile = settings(
    deadline=None,
    derandomize=not LONG,
    database=None,
    phases=[Phase.explicit, Phase.generate],  # a program that hangs takes long to shrink
    suppress_health_check=list(HealthCheck),
    print_blob=True,
)


@pytest.mark.timeout(7200 if LONG else 300)
@pytest.mark.parametrize("world", sorted(SHARE))
def test_random_programs(ranks, tmp_path, world):
    @settings(profile, max_examples=round(PROGRAMS * SHARE[world]))
    @given(st.randoms(use_true_random=True))
    def programs_mean_what_they_say(random):
        program = draw(random, world)
        note(program)
        check(program, ranks(world).run(run, program, str(tmp_path), timeout=40))

    programs_mean_what_they_say()
