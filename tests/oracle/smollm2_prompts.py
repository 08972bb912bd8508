"""Prompts of the SmolLM2 golden values: plain text (written for this file or out of copyright) and chats."""

PLAIN: dict[str, str] = {
    "one_word": "The",
    "history": "The French Revolution began in 1789 because",
    "recipe": "How to make pancakes:\n\nIngredients:\n- 2 cups of flour\n- 1 1/2 cups of milk\n- 2 eggs\n",
    "digits": "The first 20 prime numbers are 2, 3, 5, 7, 11, 13, 17, 19, 23, 29, 31,",
    "shakespeare": (
        "To be, or not to be, that is the question:\nWhether 'tis nobler in the mind to suffer\n"
        "The slings and arrows of outrageous fortune,\nOr to take arms against a sea of troubles\n"
    ),
    "letter": (
        "Dear Dr. Nguyen,\n\nThank you for your e-mail of 3 March. I'm sorry that I couldn't answer sooner;"
    ),
    "markdown": "# Changelog\n\n## 1.4.0 (2024-11-02)\n\n- **Fixed**: the `--verbose` flag\n- **Added**:",
    "python": 'def fibonacci(n: int) -> int:\n    """Return the n-th Fibonacci number."""\n    if n < 2:\n',
    "c": "#include <stdio.h>\n\nint main(void) {\n\tfor (int i = 0; i < 10; i++) {\n\t\tprintf(",
    "sql": "SELECT customers.name, COUNT(*) AS orders\nFROM customers\nJOIN orders ON",
    "json": '{"name": "Ada Lovelace", "born": 1815, "fields": ["mathematics",',
    "shell": "$ git status\nOn branch main\nYour branch is ahead of 'origin/main' by 2 commits.\n",
    "chinese": "学而时习之，不亦说乎？有朋自远方来，不亦乐乎？",
    "japanese": "吾輩は猫である。名前はまだ無い。どこで生れたか",
    "russian": "Все счастливые семьи похожи друг на друга, каждая несчастливая семья",
    "german": "Als Gregor Samsa eines Morgens aus unruhigen Träumen erwachte, fand er sich",
    "arabic": "كان يا ما كان في قديم الزمان",
    "emoji": "Best holiday ever 🏖️☀️😎 we saw 🐬🐬 and ate so much 🍦! Family photo: 👨‍👩‍👧‍👦 ",
    "whitespace": "name      qty     price\napples      3      1.20\npears      12      0.85\n\n\n   total",
    "long": (
        "It was the best of times, it was the worst of times, it was the age of wisdom, it was the age "
        "of foolishness, it was the epoch of belief, it was the epoch of incredulity, it was the season "
        "of Light, it was the season of Darkness, it was the spring of hope, it was the winter of "
        "despair, we had everything before us, we had nothing before us, we were all going direct to "
        "Heaven, we were all going direct the other way - in short, the period was so far like the "
        "present period, that some of its noisiest authorities insisted on its being received, for good "
        "or for evil, in the superlative degree of comparison only.\n\n"
        "There were a king with a large jaw and a queen with a plain face, on the throne of England; "
        "there were a king with a large jaw and a queen with a fair face, on the throne of France. In "
        "both countries it was clearer than crystal to the lords of the State preserves of loaves and "
        "fishes, that things in general were settled for ever.\n\n"
        "It was the year of Our Lord one thousand seven hundred and seventy-five. Spiritual revelations "
        "were conceded to England at that favoured period, as at this. Mrs. Southcott had recently "
        "attained her five-and-twentieth blessed birthday, of whom a prophetic private in the Life "
        "Guards had heralded the sublime appearance by announcing that arrangements were made for the "
        "swallowing up of London and Westminster."
    ),
}

CHATS: dict[str, list[dict[str, str]]] = {
    "chat_capital": [
        {"role": "user", "content": "What is the capital of France? Answer in one sentence."},
    ],
    "chat_arithmetic": [
        {
            "role": "user",
            "content": "Tom has 17 apples and gives 5 away. How many are left? Explain briefly.",
        },
    ],
    "chat_code": [
        {"role": "user", "content": "Write a Python function that reverses the words of a sentence."},
    ],
    "chat_pirate": [
        {"role": "system", "content": "You are a pirate. Answer every question like one."},
        {"role": "user", "content": "Where can I buy fresh bread?"},
    ],
    "chat_two_turns": [
        {"role": "user", "content": "Name a planet with rings."},
        {"role": "assistant", "content": "Saturn has rings."},
        {"role": "user", "content": "And one without?"},
    ],
    "chat_chinese": [{"role": "user", "content": "请用一句话介绍北京。"}],
    "chat_japanese": [{"role": "user", "content": "日本で一番高い山は何ですか？"}],
    "chat_russian": [{"role": "user", "content": "Как называется столица России?"}],
    "chat_emoji": [{"role": "user", "content": "What does 🎉🥳 mean? And 🇯🇵?"}],
    "chat_poem": [{"role": "user", "content": "Write a four-line poem about autumn leaves."}],
    "chat_yes": [{"role": "user", "content": 'Reply with the single word "yes".'}],
    "chat_list": [{"role": "user", "content": "List three tips for better sleep."}],
}
