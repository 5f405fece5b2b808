"""A server that speaks OpenEnv's wire: python open_env_server.py FOLDER ARGUMENTS-IN-JSON

The episode: a number to begin with, and one for each step, drawn from the episode's seed. It is done after
`turns` steps. `port` (0: any), `sessions` at the same time. `mortal`: it is killed before it takes each step
of each episode for the first time. `seeded` false: it draws as it likes. `gives` false: no rewards.

FOLDER gets `port`; `log`, a line for each message; and a file for each step that a server died at.
"""

import asyncio
import json
import os
import random
import signal
import sys
from pathlib import Path

from websockets.asyncio.server import serve

FOLDER = Path(sys.argv[1])
SETTINGS = {"port": 0, "sessions": 100, "turns": 3, "mortal": False, "seeded": True, "gives": True}
SETTINGS |= json.loads(sys.argv[2])
running = 0


class Episode:
    """One session's."""

    def reset(self, data):
        self.data, self.steps = data, 0
        self.draw = random.Random(data["seed"] if SETTINGS["seeded"] else None)
        largest = 1000 if SETTINGS["seeded"] else 1 << 62  # else it is never the same number twice
        return self.seen(f"begin {self.draw.randrange(largest)}", None)

    def step(self, action):
        place = FOLDER / f"died-{self.data['episode_id']}-{self.steps}"
        if SETTINGS["mortal"] and not place.exists():
            place.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        if not isinstance(action.get("guess"), str):
            raise LookupError("guess must be text")
        if action["guess"] == "!":
            raise ZeroDivisionError("no such move")
        self.steps += 1
        drawn = self.draw.randrange(1000)
        return self.seen(f"{action['guess'][::-1]} {drawn}", drawn / 1024 if SETTINGS["gives"] else None)

    def seen(self, said, reward):
        done = self.steps == SETTINGS["turns"]
        observation = {"said": said, "steps": self.steps}
        return {"observation": observation, "reward": reward, "done": done, "metadata": {"pid": os.getpid()}}


def error(code, message):
    return {"type": "error", "data": {"code": code, "message": message}}


async def session(connection):
    global running
    if running >= SETTINGS["sessions"]:
        await connection.send(json.dumps(error("CAPACITY_REACHED", "no session is left")))
        with (FOLDER / "log").open("a") as log:
            log.write("full\n")
        return
    running += 1
    episode = Episode()
    try:
        async for text in connection:
            message = json.loads(text)
            if message["type"] == "close":
                break
            with (FOLDER / "log").open("a") as log:
                log.write(text + "\n")
            if message.get("data", {}).get("guess") == "silence":
                await asyncio.Future()
            if message.get("data", {}).get("guess") == "nonsense":
                await connection.send("what?")
                continue
            try:
                act = {"reset": episode.reset, "step": episode.step}[message["type"]]
                answer = {"type": "observation", "data": act(message["data"])}
            except LookupError as wrong:
                answer = error("VALIDATION_ERROR", str(wrong.args[0]))
            except ZeroDivisionError as wrong:
                answer = error("EXECUTION_ERROR", str(wrong))
            await connection.send(json.dumps(answer))
    finally:
        running -= 1


def check(connection, request):
    return None if request.path == "/ws" else connection.respond(404, "there is nothing")


async def main():
    async with serve(session, "127.0.0.1", SETTINGS["port"], process_request=check) as server:
        part = FOLDER / "port.part"
        part.write_text(str(server.sockets[0].getsockname()[1]))
        part.rename(FOLDER / "port")
        await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(main())
