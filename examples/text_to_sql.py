"""A text-to-SQL agent on SQLite: ask, run, look at the error or the rows, ask again.

    agentspec serve                  # in another terminal; or any OpenAI-compatible server
    python examples/text_to_sql.py   # OPENAI_BASE_URL, OPENAI_API_KEY and OPENAI_MODEL are honoured

Every prompt repeats the schema and every correction repeats most of the query before it. All questions are
one application, so an answer may also be drafted from queries that were written for other questions.
"""

import os
import re
import sqlite3
from dataclasses import dataclass
from typing import Any

from openai import OpenAI

import agentspec_runtime
from agentspec_runtime.demo.gain import describe_gain

SCHEMA = """\
CREATE TABLE customers (id INTEGER PRIMARY KEY, name TEXT, city TEXT);
CREATE TABLE orders (id INTEGER PRIMARY KEY, customer_id INTEGER, amount INTEGER, year INTEGER);
"""
ROWS = """\
INSERT INTO customers VALUES (1, 'Ada', 'London'), (2, 'Grace', 'New York'), (3, 'Alan', 'London');
INSERT INTO orders VALUES (1, 1, 50, 2023), (2, 1, 70, 2024), (3, 2, 30, 2024), (4, 3, 90, 2024);
"""


@dataclass(frozen=True)
class Question:
    """A question, and a query whose rows are the right answer (the model never sees it)."""

    text: str
    reference: str


QUESTIONS = (
    Question("How many customers are there?", "SELECT COUNT(*) FROM customers"),
    Question(
        "What are the names of the customers in London?", "SELECT name FROM customers WHERE city = 'London'"
    ),
    Question("What is the sum of all order amounts?", "SELECT SUM(amount) FROM orders"),
    Question(
        "What is the sum of the order amounts of the year 2024?",
        "SELECT SUM(amount) FROM orders WHERE year = 2024",
    ),
    Question(
        "How many orders does each customer have? Give name and number.",
        "SELECT name, COUNT(*) FROM customers JOIN orders ON customer_id = customers.id GROUP BY name",
    ),
)
SYSTEM = f"You write SQLite queries. Answer with one SQL code block.\nThe tables are:\n```sql\n{SCHEMA}```"


def open_database() -> sqlite3.Connection:
    """The database, in memory, closed to changes once it is filled."""
    database = sqlite3.connect(":memory:")
    database.executescript(SCHEMA + ROWS)
    database.execute("PRAGMA query_only = ON")
    return database


def budget() -> Any:
    """A progress handler that stops a query after about a million steps of the virtual machine."""
    calls = iter(range(1000))
    return lambda: int(next(calls, None) is None)


@agentspec_runtime.tool
def run_query(database: sqlite3.Connection, query: str) -> str:
    """Run a query; its rows, or what SQLite says against it."""
    database.set_progress_handler(budget(), 1000)
    try:
        rows = database.execute(query).fetchmany(21)
    except (sqlite3.Error, sqlite3.Warning) as error:
        return f"error: {error}"
    lines = [" | ".join(map(str, row)) for row in rows[:20]]
    return "\n".join([*lines, *(["..."] if len(rows) > 20 else [])]) or "(no rows)"


def extract_query(answer: str) -> str:
    """The first code block, or all of it; one statement."""
    found = re.search(r"```(?:sql)?\s*\n(.*?)(?:```|\Z)", answer, re.DOTALL)
    return (found.group(1) if found else answer).strip().partition(";")[0]


def same_rows(database: sqlite3.Connection, query: str, reference: str) -> bool:
    """Whether both queries give the same rows, in whatever order."""
    try:
        return sorted(map(repr, database.execute(query))) == sorted(map(repr, database.execute(reference)))
    except (sqlite3.Error, sqlite3.Warning):
        return False


def answer_question(
    client: OpenAI, model: str, database: sqlite3.Connection, question: Question, turns: int
) -> bool:
    """Let the model write, see and correct its query; True if the last one is right."""
    messages: list[Any] = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": question.text}]
    query = ""
    for _ in range(turns):
        answer = client.chat.completions.create(model=model, messages=messages, max_tokens=100, temperature=0)
        text = answer.choices[0].message.content or ""
        query = extract_query(text)
        result = run_query(database, query)
        print(f"    {' '.join(query.split())[:90]}\n      -> {result.replace(chr(10), ', ')[:90]}")
        if not result.startswith("error:"):
            break
        messages += [
            {"role": "assistant", "content": text},
            {"role": "user", "content": f"{result}\nCorrect the query."},
        ]
    return same_rows(database, query, question.reference)


def main() -> None:
    """Ask all questions."""
    agentspec_runtime.instrument()
    client = OpenAI(
        base_url=os.environ.get("OPENAI_BASE_URL", "http://127.0.0.1:8000/v1"),
        api_key=os.environ.get("OPENAI_API_KEY", "unused"),
    )
    model = os.environ.get("OPENAI_MODEL") or client.models.list().data[0].id
    database = open_database()
    right = 0
    with agentspec_runtime.collect_calls() as calls:
        for number, question in enumerate(QUESTIONS):
            print(question.text)
            with agentspec_runtime.session(f"sql-{number}", agent="sql", expect=["code"]):
                right += answer_question(client, model, database, question, turns=3)
    print(f"right answers: {right} of {len(QUESTIONS)}")
    print(describe_gain(calls))


if __name__ == "__main__":
    main()
