"""Small sets of questions in the schemas of ARC, MMLU, GSM8K and HumanEval, written for these tests."""

import json
from pathlib import Path
from typing import Any

from lapbench.datamodules.convert import chat_schemas

Row = dict[str, Any]


def arc(question: str, texts: list[str], answer: str, labels: str = "ABCD") -> Row:
    return {
        "id": f"Test_{len(question)}",
        "question": question,
        "choices": {"text": texts, "label": list(labels[: len(texts)])},
        "answerKey": answer,
    }


def mmlu(subject: str, question: str, choices: list[str], answer: int) -> Row:
    return {"question": question, "subject": subject, "choices": choices, "answer": answer}


def function(name: str, arguments: str, text: str, body: str, *checks: str) -> Row:
    return {
        "task_id": f"Test/{name}",
        "prompt": f'def {name}({arguments}):\n    """{text}"""\n',
        "canonical_solution": f"    {body}\n",
        "test": "def check(candidate):\n" + "".join(f"    assert {check}\n" for check in checks),
        "entry_point": name,
    }


ROWS: dict[str, list[Row]] = {
    "arc_easy": [
        arc("What do bees make?", ["milk", "honey", "silk", "wool"], "B"),
        arc("Which one is a liquid at 20 degrees?", ["iron", "salt", "air", "water"], "4", "1234"),
        arc("What pulls a stone down?", ["gravity", "light", "sound"], "A"),
        arc("Which animal lays eggs?", ["cat", "dog", "hen", "cow"], "C"),
    ],
    "arc_challenge": [
        arc("Why does ice float on a lake?", ["It is cold.", "It is less dense.", "It is wet.", "It is blue."], "B"),
        arc("What carries a signal along a nerve?", ["blood", "bone", "charge"], "C"),
    ],
    "mmlu": [
        mmlu("anatomy", "Where is the femur?", ["arm", "leg", "head", "hand"], 1),
        mmlu("anatomy", "How many chambers has a human heart?", ["1", "2", "3", "4"], 3),
        mmlu("astronomy", "Which planet has the largest mass?", ["Jupiter", "Mars", "Venus", "Earth"], 0),
    ],
    "gsm8k": [
        {
            "question": "Ann has 3 pens and buys 4 more. How many pens has she now?",
            "answer": "She has 3+4=<<3+4=7>>7 pens.\n#### 7",
        },
        {
            "question": "A box holds 600 nails. How many do 2 boxes hold?",
            "answer": "They hold 600*2=<<600*2=1200>>1,200 nails.\n#### 1,200",
        },
    ],
    "humaneval": [
        function("add", "a, b", "Sum of a and b.", "return a + b", "candidate(2, 3) == 5", "candidate(0, 0) == 0"),
        function("last", "items", "The last item.", "return items[-1]", "candidate([1, 2]) == 2"),
    ],
}


def conversations() -> list[Any]:
    """All questions with their answers, as fine-tuning has them."""
    rows = ROWS
    found = [chat_schemas.arc(row) for row in rows["arc_easy"] + rows["arc_challenge"]]
    found += [chat_schemas.mmlu(row) for row in rows["mmlu"]]
    found += [chat_schemas.gsm8k(row) for row in rows["gsm8k"]]
    for row in rows["humaneval"]:
        answer = f"```python\n{row['prompt']}{row['canonical_solution']}```"
        found.append([{"role": "user", "content": row["prompt"]}, {"role": "assistant", "content": answer}])
    return found


def write(folder: Path, rows: dict[str, list[Row]] = ROWS) -> Path:
    """One folder for each task, with test.jsonl."""
    for task, own in rows.items():
        (folder / task).mkdir(parents=True)
        (folder / task / "test.jsonl").write_text("".join(json.dumps(row) + "\n" for row in own))
    return folder
