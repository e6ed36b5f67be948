"""Phrasings of questions, in which `{}` stands for the name asked about, and the fixed answers.

`UNSEEN` is in none of the lists, so that it measures how the model handles a phrasing it never saw.
"""

from __future__ import annotations

UNSEEN = "Can you explain what {} does?"

SHORT = """
What does {} do?
what does {} do
What is {}?
what is {}
What is {} for?
What is the purpose of {}?
What do I use {} for?
In one sentence, what does {} do?
Please explain {}.
Please tell me what {} does.
Could you tell me what {} does?
I would like to know what {} does.
Explain what {} does, please.
Do you know what {} does?
what's {} for?
{}?
""".strip().splitlines()
LONG = """
Explain {}.
explain {}
Tell me about {}.
tell me about {}
Can you tell me about {}?
Describe {}.
describe {}
Help me with {}.
Show me the documentation of {}.
Can you explain {}?
""".strip().splitlines()
SIGNATURE = """
What is the signature of {}?
what is the signature of {}
How do I call {}?
how do I call {}
How is {} called?
What arguments does {} take?
Which parameters does {} have?
Show me the signature of {}.
Can you show me the signature of {}?
""".strip().splitlines()
MODULE = """
Which module is {} in?
which module is {} in
What module does {} belong to?
Where do I find {}?
From which module do I import {}?
""".strip().splitlines()

THEN_WHAT = [
    "And what does it do?",
    "What does it do?",
    "what does it do",
    "What is it for?",
    "what is it for",
]
THEN_MORE = ["Explain it.", "Tell me more about it.", "Describe it, please."]
THEN_SIGNATURE = [
    "And its signature?",
    "and its signature?",
    "What is its signature?",
    "How do I call it?",
    "And what arguments does it take?",
]
THEN_MODULE = [
    "Which module is it in?",
    "And its module?",
    "and which module is it in?",
    "Where do I find it?",
]

UNKNOWN = "I don't know that one. I only know functions, methods and classes of Python's standard library."
OFF_TOPIC_ANSWER = (
    "I'm sorry, I can't help with that. I am a small model that only knows Python's standard library. "
    "Ask me, for example, what itertools.chain does."
)
HELLO = "Hello! Ask me about a function, method or class of Python's standard library."
GREETINGS = """
Hello
hello
Hello!
Hi
hi
Hi!
Hi there
Hey
Good morning
Good evening!
Hello there!
""".strip().splitlines()
THANKS = """
Thanks
Thanks!
thank you
Thank you!
Thank you very much.
Great, thanks!
Perfect, thank you.
""".strip().splitlines()
FAREWELLS = """
Bye
Goodbye!
bye bye
See you later.
Good night!
""".strip().splitlines()
WELL_BEING = """
How are you?
how are you
How are you doing today?
How is it going?
""".strip().splitlines()
IDENTITY = """
Who are you?
who are you
What are you?
What is your name?
What can you do?
What do you know?
""".strip().splitlines()
OFF_TOPIC = """
What is the weather like today?
Tell me a joke.
Write a poem about the sea.
Who won the world cup?
What is the capital of France?
How old are you?
Translate this into German.
What time is it?
Write me an essay about history.
How do I cook rice?
Who is the president?
What is 17 times 23?
Recommend me a good film.
Can you book a flight for me?
Tell me a story.
Explain quantum physics.
What is the meaning of life?
Write a program that sorts a list.
Who wrote Hamlet?
Sing a song.
How far away is the moon?
What should I eat tonight?
Summarise this article.
Do you like music?
""".strip().splitlines()

SMALL_TALK = {
    HELLO: GREETINGS,
    "You're welcome! Is there anything else you would like to know?": THANKS,
    "Goodbye! Come back any time.": FAREWELLS,
    "I am well, thank you. What would you like to know about Python's standard library?": WELL_BEING,
    "I am the demonstration model of Raydix. I know the docstrings of Python's standard library.": IDENTITY,
    OFF_TOPIC_ANSWER: OFF_TOPIC,
}
