# my_agent.py
from openai import AsyncOpenAI


async def agent(task):
    client = AsyncOpenAI(base_url=task.base_url, api_key=task.api_key)
    messages = task.messages
    for _ in range(3):
        answer = await client.chat.completions.create(model="policy", messages=messages)
        message = answer.choices[0].message
        if message.content.strip() == task.label:
            return 1.0
        messages += [message, {"role": "user", "content": "That is wrong. Try again."}]
    return 0.0
