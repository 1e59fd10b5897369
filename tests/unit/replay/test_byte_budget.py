import asyncio

from async_grpo.replay.generator_client import ByteBudget


async def test_bytes_on_their_way_stay_within_the_limit():
    budget = ByteBudget()
    budget.limit = 10
    on_their_way, most = 0, 0
    gate = asyncio.Event()

    async def send(size: int) -> None:
        nonlocal on_their_way, most
        async with budget.spend(size):
            on_their_way += size
            most = max(most, on_their_way)
            await gate.wait()
            on_their_way -= size

    async with asyncio.TaskGroup() as tasks:
        for size in (4, 6, 5, 5, 10):
            tasks.create_task(send(size))
        await asyncio.sleep(0)
        assert on_their_way == 10
        gate.set()
    assert (on_their_way, most) == (0, 10)


async def test_a_message_above_the_limit_goes_alone():
    budget = ByteBudget()
    budget.limit = 10
    async with budget.spend(25):
        second = asyncio.create_task(_enter(budget, 1))
        await asyncio.sleep(0)
        assert not second.done()
    await asyncio.wait_for(second, 5)


async def test_failed_send_gives_its_bytes_back():
    budget = ByteBudget()
    budget.limit = 10
    try:
        async with budget.spend(10):
            raise ConnectionError
    except ConnectionError:
        pass
    await asyncio.wait_for(_enter(budget, 10), 5)


async def _enter(budget: ByteBudget, size: int) -> None:
    async with budget.spend(size):
        pass
