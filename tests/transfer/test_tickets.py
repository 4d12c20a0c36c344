"""Tickets: random, for one object, short-lived."""

from __future__ import annotations

import threading

import pytest
from transfer_support import VERSION

from replicator.errors import TicketError
from replicator.transfer.tickets import TicketOffice

ONE, OTHER = VERSION.object("one"), VERSION.object("other")


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def test_a_ticket_is_for_its_object() -> None:
    office = TicketOffice()
    first, ttl_s = office.issue(ONE)
    second, _ = office.issue(OTHER)
    again, _ = office.issue(ONE)
    assert ttl_s > 0
    assert len({first, second, again}) == 3
    assert (office.resolve(first), office.resolve(second), office.resolve(again)) == (ONE, OTHER, ONE)


def test_tickets_cannot_be_guessed() -> None:
    """256 bits each, from the system's source of randomness."""
    tokens = {TicketOffice().issue(ONE)[0] for _ in range(100)}
    assert len(tokens) == 100
    assert all(len(token) == 43 for token in tokens)


@pytest.mark.parametrize("token", ["", "guess", "x" * 43, "\0"])
def test_unknown_ticket(token: str) -> None:
    office = TicketOffice()
    office.issue(ONE)
    with pytest.raises(TicketError, match="unknown or has expired"):
        office.resolve(token)


def test_expires_after_its_last_use() -> None:
    clock = Clock()
    office = TicketOffice(ttl_s=10, clock=clock)
    token, ttl_s = office.issue(ONE)
    assert ttl_s == 10
    for _ in range(5):
        clock.now += 9
        assert office.resolve(token) == ONE
    clock.now += 10
    with pytest.raises(TicketError):
        office.resolve(token)
    assert len(office) == 0


def test_the_number_of_tickets_is_bounded() -> None:
    """The one that was unused for longest goes first."""
    clock = Clock()
    office = TicketOffice(limit=3, clock=clock)
    tokens = []
    for _ in range(3):
        tokens.append(office.issue(ONE)[0])
        clock.now += 1
    office.resolve(tokens[0])
    newest, _ = office.issue(OTHER)
    assert len(office) == 3
    assert office.resolve(tokens[0]) == ONE
    assert office.resolve(newest) == OTHER
    with pytest.raises(TicketError):
        office.resolve(tokens[1])


def test_expired_tickets_make_room_before_good_ones_go() -> None:
    clock = Clock()
    office = TicketOffice(ttl_s=10, limit=2, clock=clock)
    office.issue(ONE)
    clock.now += 9
    kept, _ = office.issue(ONE)
    clock.now += 2
    office.issue(OTHER)
    assert office.resolve(kept) == ONE


def test_used_from_many_threads() -> None:
    office = TicketOffice(limit=50)
    errors: list[BaseException] = []

    def work() -> None:
        try:
            for _ in range(300):
                token, _ = office.issue(ONE)
                assert office.resolve(token) == ONE or len(office) >= 50
        except TicketError:
            pass  # pushed out by the other threads
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert len(office) <= 50
