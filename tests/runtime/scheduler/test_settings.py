import pytest

from ingot.runtime.program import Limits
from ingot.runtime.scheduler import ChunkingPolicy, SchedulerPolicy, SchedulerSettings, SettingsError


@pytest.mark.parametrize(("options", "message"), [
    ({"max_batch_size": 0}, "max_batch_size must be a whole number of at least 1, not 0"),
    ({"max_batch_size": True}, "max_batch_size must be a whole number of at least 1, not True"),
    ({"max_num_tokens": 8.0}, "max_num_tokens must be a whole number of at least 1, not 8.0"),
    ({"max_num_tokens": 7}, "max_num_tokens 7 is below max_batch_size 8: each sequence that generates takes one token "
                            "of every step"),
    ({"policy": "MAX_UTILIZATION"}, "policy must be one of GUARANTEED_NO_EVICT, MAX_UTILIZATION, STATIC_BATCH, not "
                                    "'MAX_UTILIZATION'"),
    ({"chunking": None}, "chunking must be one of FIRST_COME_FIRST_SERVED, EQUAL_PROGRESS, not None"),
    ({"ageing_s": 0.0}, "ageing_s must be a finite number of seconds above 0, not 0.0: without ageing a stream of "
                        "urgent requests would keep the others waiting for ever"),
    ({"ageing_s": float("nan")}, "not nan"),
    ({"ageing_s": float("inf")}, "not inf"),
])  # fmt: skip
def test_each_option_is_checked(options: dict[str, object], message: str) -> None:
    with pytest.raises(SettingsError) as caught:
        SchedulerSettings(**{"max_batch_size": 8, "max_num_tokens": 64, **options})  # type: ignore[arg-type]
    assert message in str(caught.value)


def test_an_engines_limits_are_the_defaults_and_the_bounds() -> None:
    limits = Limits(max_batch_size=8, max_num_tokens=64, max_seq_len=100)
    assert SchedulerSettings.within(limits) == SchedulerSettings(8, 64)
    assert SchedulerSettings.within(limits, 4, 32, policy=SchedulerPolicy.STATIC_BATCH) == SchedulerSettings(
        4, 32, SchedulerPolicy.STATIC_BATCH, ChunkingPolicy.FIRST_COME_FIRST_SERVED)
    with pytest.raises(SettingsError) as caught:
        SchedulerSettings.within(limits, max_num_tokens=65)
    assert str(caught.value) == ("max_num_tokens 65 is above 64, what the engine was built for.\n"
                                 "  Lower it, or build the engine with --max-num-tokens 65.")


def test_fewer_tokens_mean_fewer_sequences() -> None:
    limits = Limits(max_batch_size=8, max_num_tokens=64, max_seq_len=100)
    assert SchedulerSettings.within(limits, max_num_tokens=4) == SchedulerSettings(4, 4)
    with pytest.raises(SettingsError, match="max_num_tokens must be a whole number of at least 1, not -1"):
        SchedulerSettings.within(limits, max_num_tokens=-1)
    with pytest.raises(SettingsError, match="max_num_tokens 4 is below max_batch_size 5"):
        SchedulerSettings.within(limits, 5, 4)
