"""Formulas for a run that deaths strike at random: how often to save, and what share of the time is useful.

Sources: J. W. Young, A first order approximation to the optimum checkpoint interval (1974); J. T. Daly, A
higher order estimate of the optimum checkpoint interval for restart dumps (2006). Both assume that training
stands still for `cost` seconds for each save, that deaths have no memory, and that a step is short beside the
interval. `effective_ratio` adds what Cairn does: a save is durable only some time after it began, while
training goes on.
"""

import math

from cairn.tools.planning.fleet import LOSING, Death, FleetConstants, PlanOption

MOST = 700.0
"""Exponent up to which a float holds its exponential; runs beyond it never finish."""


def young(cost: float, between: float) -> float:
    """Young's interval between two saves in seconds, the save itself left out.

    cost: seconds of a save. between: mean seconds between deaths.
    """
    return math.sqrt(2 * cost * between)


def daly(cost: float, between: float) -> float:
    """Daly's interval, likewise; for a save that takes twice the time between deaths or longer, that time."""
    if math.isinf(between):
        return math.inf
    if cost >= 2 * between:
        return between
    share = cost / (2 * between)
    return young(cost, between) * (1 + math.sqrt(share) / 3 + share / 9) - cost


def best_interval(fleet: FleetConstants, option: PlanOption) -> int:
    """Steps between two saves by Daly's formula, but no fewer than a save takes to be durable."""
    near = option.near(fleet)
    rate, step = fleet.losing_rate(near.survives if near else ()), option.step_seconds(fleet)
    seconds = daly(fleet.save_cost, 1 / rate if rate else math.inf)
    seconds = min(max(seconds, fleet.save_seconds - fleet.save_cost), fleet.horizon)
    return max(1, round(seconds / step))


def effective_ratio(useful: float, period: float, lag: float, restart: float, rate: float) -> float:
    """Share of the time in which new steps are taken, if deaths have no memory and all are alike.

    A save begins every `period` seconds, of which `useful` are steps, and is durable `lag` seconds later.
    After a death the run goes on from the newest durable save, `restart` seconds later; a death meanwhile
    begins the restart again. Without deaths a commit follows `period` seconds after the one before. After a
    restart, the steps since the newest durable save are taken again until the next save begins, and that is
    durable: useful + lag seconds without a death.

    Args:
        rate: deaths in a second.
    """
    if not rate:
        return useful / period
    if rate * (useful + lag) > MOST or rate * restart > MOST:
        return 0.0
    restart = math.expm1(rate * restart) / rate
    survives, survives_again = math.exp(-rate * period), math.exp(-rate * (useful + lag))
    again = (restart + (1 - survives_again) / rate) / survives_again
    return useful / ((1 - survives) / rate + (1 - survives) * again)


def expected(fleet: FleetConstants, option: PlanOption) -> float | None:
    """The goodput (ETTR) of an option by formulas, without what spares and machines are waited for.

    None if the death of a machine would take all steps with it: then there is no formula.

    Deaths that a run meets without going back count by their mean downtime, and servers by how many are
    missing on average.
    """
    if option.tier == "disk" and not fleet.shared and fleet.rate("machine", 0):
        return None
    step, near = option.step_seconds(fleet), option.near(fleet)
    spared: tuple[Death, ...] = near.survives if near else ()
    far: list[Death] = [death for death in LOSING if death not in spared]
    rate = fleet.losing_rate(spared)
    useful, period, lag = option.interval * step, option.period(fleet), fleet.save_seconds
    restart = sum(fleet.rate(death, 0) * fleet.restart(death) for death in far) / rate if rate else 0.0
    if rate and option.tier == "remote" and not fleet.shared and fleet.upload_seconds is not None:
        older = (option.uploaded - 1) / 2 * period + fleet.upload_seconds
        restart += fleet.rate("machine", 0) / rate * older
    ratio = effective_ratio(useful, period, lag, restart, rate)
    if near:
        # Each costs half a step and the copy's time on average, beside its restart.
        lost = step / 2 + near.seconds
        ratio /= 1 + sum(fleet.rate(death, 0) * (fleet.restart(death) + lost) for death in spared)
    ratio *= 1 - min(fleet.rate("orchestrator", 0) * fleet.restart("orchestrator"), 1.0)
    if fleet.generate and option.servers:
        down = {death: fleet.rates.get(death, 0.0) * fleet.restart(death) for death in ("server", "machine")}
        missing = min(sum(down.values()) * option.servers, 1.0)
        slower = option.step_seconds(fleet, option.servers - 1)
        ratio *= 1 - missing + missing * step / slower
    return ratio * fleet.step_seconds(option.servers) / step
