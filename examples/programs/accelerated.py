"""GPT-2 fine-tuned with Accelerate: its loaders, accumulation, clipping, mixed precision.

tilefit check examples/programs/accelerated.py --gpu h200 --fake-data
"""

import torch
from accelerate import Accelerator
from datasets import load_dataset
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, AutoTokenizer, get_linear_schedule_with_warmup


def main(length=256, batch=8, epochs=3):
    accelerator = Accelerator(mixed_precision="bf16", gradient_accumulation_steps=4)
    tokenizer = AutoTokenizer.from_pretrained("gpt2")
    tokenizer.pad_token = tokenizer.eos_token
    texts = load_dataset("wikitext", "wikitext-2-raw-v1", split="train")

    def collate(rows):
        encoded = tokenizer(
            [row["text"] for row in rows], padding="max_length", truncation=True, max_length=length,
            return_tensors="pt",
        )  # fmt: skip
        labels = encoded["input_ids"].masked_fill(encoded["attention_mask"] == 0, -100)
        return {
            "input_ids": encoded["input_ids"],
            "attention_mask": encoded["attention_mask"],
            "labels": labels,
        }

    loader = DataLoader(texts, batch, shuffle=True, collate_fn=collate, num_workers=2)
    model = AutoModelForCausalLM.from_pretrained("gpt2")
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-5)
    schedule = get_linear_schedule_with_warmup(optimizer, 100, epochs * len(loader))
    model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
    for epoch in range(epochs):
        model.train()
        for step, rows in enumerate(loader):
            with accelerator.accumulate(model):
                loss = model(**rows).loss
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            if step % 20 == 0:
                accelerator.print(f"epoch {epoch} step {step}: {accelerator.gather(loss).mean().item():.3f}")
    accelerator.wait_for_everyone()
    accelerator.unwrap_model(model).save_pretrained("out")


if __name__ == "__main__":
    main()
